// Attention of a whole step as work for several threads; `attention.cpp` does one piece of it.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "host.h"
#include "read_ahead.h"

namespace dspark {

// Who sits where: the arrays of `dspark.core.AttentionLayout`.
struct Layout {
  const int32_t* starts;  // [num_requests + 1]
  const int32_t* tables;  // [num_requests][table_size]
  const int64_t* slots;
  const int32_t* visible;
  const int64_t* positions;
  int64_t num_tokens, num_requests, table_size;

  // The arrays are used in place; throws where they have other sizes or types.
  static Layout of(const Tensor& tables, const Tensor& starts, const Tensor& visible,
                   const Tensor& positions, const Tensor& slots, int64_t num_tokens);
  // Throws unless every slot and every page that is read exists.
  void check(int64_t num_pages, int64_t page_size) const;
};

// What pages of keys or values are: type, strides and size of a page, as `Attention` has them.
// Throws for tensors that are no pages of `num_heads` heads for rows of `type`.
struct PageShape {
  bool has_bytes;
  int64_t page_size;
  int64_t strides[3];

  static PageShape of(const Tensor& pages, at::ScalarType type, int64_t num_heads,
                      int64_t head_dim);
};

// Keys and values of a layer: tells `a`, whose type and head_dim are set, where they lie.
void set_pages(Attention& a, const Tensor& k_pages, const Tensor& v_pages, int64_t num_heads);

// A key or value row of one token and head into its page.
void write_row(const Kernels& k, const Attention& a, bool is_key, const char* row, int64_t slot,
               int64_t head);

// The tiles of a step and the chunks of positions that each of them sees: a piece of work is one
// chunk of one tile, and whoever does the last piece of a tile adds its chunks up, in order.
class AttentionWork {
 public:
  // Of `shape`: number of sharing heads, window, head_dim; `visible` and `positions` are used later.
  AttentionWork(const Attention& shape, const Layout& layout, int64_t num_kv_heads);

  // Tiles whose partial results fit into memory together; usually there is one group of all.
  int64_t num_groups() const { return static_cast<int64_t>(group_items_.size()) - 1; }
  int64_t num_items() const { return static_cast<int64_t>(pieces_.size()); }
  int64_t memory_size(int64_t num_threads) const;  // of floats

  // What a thread will read of its share of a group; some of it may be asked for at once.
  ReadAhead read_ahead(const Attention& a, int64_t group, int64_t thread,
                       int64_t num_threads) const;
  // One thread's share of a group. The next group may start when all threads are through with
  // this one.
  void run(const Attention& a, int64_t group, float* memory, int64_t thread, int64_t num_threads,
           ReadAhead& ahead);

 private:
  struct Tile {
    AttentionTile tile;
    int64_t first_chunk, num_chunks;
  };

  // What a piece, or a whole tile, costs: positions times rows, and reading them.
  static int64_t num_seen(const Attention& shape, const Tile& t, int64_t chunk);
  static int64_t cost_of(const Attention& shape, const Tile& t, int64_t chunk);
  static int64_t cost_of(const Attention& shape, const Tile& t);
  void add_tiles(const Attention& shape, const int32_t* table, int64_t begin, int64_t end,
                 int64_t num_kv_heads);
  void even_out(const Attention& shape, int64_t num_threads);
  void add_pieces(const Attention& shape);
  void finish_tile(const Attention& a, const Tile& tile, float* partials) const;

  // The pieces [first, second) of a thread: all threads have about as much to do.
  std::pair<int64_t, int64_t> share(int64_t group, int64_t thread, int64_t num_threads) const;

  std::vector<Tile> tiles_;
  std::vector<AttentionPiece> pieces_;
  std::vector<int64_t> tile_of_;  // each piece's
  std::vector<int64_t> costs_;  // of all pieces before each, then of all
  std::vector<int64_t> group_items_;  // first piece of each group, then the number of all
  std::vector<std::atomic<int64_t>> left_;  // pieces of each tile that are not done
  int64_t tiles_per_group_ = 1;
  int64_t row_size_ = 0, chunk_size_ = 0, tile_size_ = 0, scratch_size_ = 0;  // floats
};

}  // namespace dspark
