#include "attention_work.h"

#include <ATen/Parallel.h>
#include <string.h>

#include <algorithm>

namespace dspark {
namespace {

// Reading keys and values costs as much as so many rows; bytes need not be transposed.
constexpr int64_t kRowsReadingTakes = 12, kRowsReadingBytesTakes = 4;
constexpr int64_t kFewTilesPerThread = 8;  // more divide well enough
constexpr int64_t kLinesAhead = 2048;  // 128 KiB: as far ahead as a thread asks
constexpr int64_t kMaxPartials = int64_t{1} << 23;  // floats held at a time, 32 MiB

int64_t reading_cost(const Attention& a) {
  return a.has_bytes ? kRowsReadingBytesTakes : kRowsReadingTakes;
}

int64_t first_seen(const Attention& a, int64_t token) {
  return a.window > 0 ? std::max<int64_t>(0, a.positions[token] + 1 - a.window) : 0;
}

}  // namespace

Layout Layout::of(const Tensor& tables, const Tensor& starts, const Tensor& visible,
                  const Tensor& positions, const Tensor& slots, int64_t num_tokens) {
  TORCH_CHECK(tables.dim() == 2, "block_tables_RP must have two dimensions, got ", tables.sizes());
  Layout layout = {};
  layout.num_tokens = num_tokens;
  layout.num_requests = starts.numel() - 1;
  layout.table_size = tables.size(1);
  layout.starts = contiguous_data<int32_t>(starts, 2, "query_starts_R1");
  layout.tables = contiguous_data<int32_t>(tables, layout.num_requests * layout.table_size,
                                           "block_tables_RP");
  layout.slots = contiguous_data<int64_t>(slots, num_tokens, "slots_N");
  layout.visible = contiguous_data<int32_t>(visible, num_tokens, "visible_N");
  layout.positions = contiguous_data<int64_t>(positions, num_tokens, "positions_N");
  return layout;
}

void Layout::check(int64_t num_pages, int64_t page_size) const {
  const int64_t num_slots = num_pages * page_size;
  for (int64_t n = 0; n < num_tokens; ++n)
    TORCH_CHECK(slots[n] >= 0 && slots[n] < num_slots, "slot ", slots[n], " is not among ",
                num_slots);
  TORCH_CHECK(starts[0] == 0 && starts[num_requests] == num_tokens,
              "query_starts_R1 must run from 0 to the number of tokens, ", num_tokens);
  for (int64_t r = 0; r < num_requests; ++r) {
    TORCH_CHECK(starts[r] <= starts[r + 1], "query_starts_R1 must not fall");
    int64_t longest = 0;
    for (int64_t n = starts[r]; n < starts[r + 1]; ++n)
      longest = std::max<int64_t>(longest, visible[n]);
    TORCH_CHECK(longest <= table_size * page_size, longest, " visible positions, but pages for ",
                table_size * page_size);
    for (int64_t p = 0; p < ceil_div(longest, page_size); ++p) {
      const int64_t page = tables[r * table_size + p];
      TORCH_CHECK(page >= 0 && page < num_pages, "page ", page, " does not exist");
    }
  }
}

PageShape PageShape::of(const Tensor& pages, at::ScalarType type, int64_t num_heads,
                        int64_t head_dim) {
  PageShape shape = {};
  shape.has_bytes = pages.scalar_type() == at::kChar;
  const bool fits =
      shape.has_bytes
          ? pages.dim() == 4 && pages.size(3) == byte_block_size(head_dim)
          : pages.dim() == 4 && pages.scalar_type() == type && pages.size(3) == head_dim;
  TORCH_CHECK(fits && pages.size(1) == num_heads && (pages.stride(3) == 1 || pages.size(3) == 1),
              "pages of ", pages.sizes(), " and ", pages.scalar_type(), " do not hold ", num_heads,
              " heads of ", head_dim, " values of ", type);
  shape.page_size = pages.size(2) * (shape.has_bytes ? kBytePositions : 1);
  for (int i = 0; i < 3; ++i) shape.strides[i] = pages.stride(i);
  return shape;
}

void set_pages(Attention& a, const Tensor& k_pages, const Tensor& v_pages, int64_t num_heads) {
  const at::ScalarType type = a.type == Type::kFloat32 ? at::kFloat : at::kBFloat16;
  const PageShape keys = PageShape::of(k_pages, type, num_heads, a.head_dim);
  const PageShape values = PageShape::of(v_pages, type, num_heads, a.head_dim);
  TORCH_CHECK(k_pages.sizes() == v_pages.sizes() && keys.has_bytes == values.has_bytes,
              "keys in pages of ", k_pages.sizes(), ", but values in ", v_pages.sizes());
  a.has_bytes = keys.has_bytes;
  a.page_size = keys.page_size;
  a.k_pages = bytes(k_pages);
  a.v_pages = bytes(v_pages);
  std::copy_n(keys.strides, 3, a.k_strides);
  std::copy_n(values.strides, 3, a.v_strides);
}

void write_row(const Kernels& k, const Attention& a, bool is_key, const char* row, int64_t slot,
               int64_t head) {
  const int64_t* const strides = is_key ? a.k_strides : a.v_strides;
  char* const pages = const_cast<char*>(is_key ? a.k_pages : a.v_pages);
  const int64_t at = slot % a.page_size;
  if (a.has_bytes) {
    char* const block = pages + slot / a.page_size * strides[0] + head * strides[1] +
                        at / kBytePositions * strides[2];
    return k.place_bytes(a, is_key, row, block, at % kBytePositions);
  }
  const int64_t value_size = a.type == Type::kBFloat16 ? 2 : 4;
  memcpy(pages + (slot / a.page_size * strides[0] + head * strides[1] + at * strides[2]) *
                     value_size,
         row, static_cast<size_t>(a.head_dim * value_size));
}

AttentionWork::AttentionWork(const Attention& shape, const Layout& layout, int64_t num_kv_heads) {
  const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / shape.num_sharing);
  for (int64_t r = 0; r < layout.num_requests; ++r)
    for (int64_t begin = layout.starts[r]; begin < layout.starts[r + 1]; begin += tile_tokens)
      add_tiles(shape, layout.tables + r * layout.table_size, begin,
                std::min<int64_t>(begin + tile_tokens, layout.starts[r + 1]), num_kv_heads);
  even_out(shape, at::get_num_threads());
  int64_t max_rows = 0, max_chunks = 0;
  for (const Tile& t : tiles_) {
    max_rows = std::max(max_rows, (t.tile.token_end - t.tile.token_begin) * shape.num_sharing);
    max_chunks = std::max(max_chunks, t.num_chunks);
  }
  row_size_ = partial_size(shape.head_dim);
  chunk_size_ = max_rows * row_size_;
  tile_size_ = max_chunks * chunk_size_;
  scratch_size_ = kernels().attention_scratch(shape, max_rows);
  const int64_t num_tiles = static_cast<int64_t>(tiles_.size());
  tiles_per_group_ = std::clamp<int64_t>(kMaxPartials / std::max<int64_t>(1, tile_size_), 1,
                                         std::max<int64_t>(1, num_tiles));
  add_pieces(shape);
}

void AttentionWork::add_tiles(const Attention& shape, const int32_t* table, int64_t begin,
                              int64_t end, int64_t num_kv_heads) {
  int64_t low = INT64_MAX, high = 0;
  for (int64_t n = begin; n < end; ++n) {
    if (shape.visible[n] <= 0) continue;
    low = std::min(low, first_seen(shape, n));
    high = std::max<int64_t>(high, shape.visible[n]);
  }
  if (low >= high) low = high = 0;  // nobody sees anything: one empty chunk
  const int64_t first = low / kChunk, last = std::max<int64_t>(first, (high - 1) / kChunk);
  for (int64_t g = 0; g < num_kv_heads; ++g)
    tiles_.push_back({{table, begin, end, g}, first, last - first + 1});
}

// Few tiles do not divide by the threads. One that lies across the end of a thread's share is cut
// in two by its tokens, where that gains more than it costs: its positions are then read twice.
void AttentionWork::even_out(const Attention& shape, int64_t num_threads) {
  if (static_cast<int64_t>(tiles_.size()) >= kFewTilesPerThread * num_threads) return;
  for (int64_t number = 1; number < num_threads; ++number) {
    int64_t total = 0, before = 0;
    for (const Tile& t : tiles_) total += cost_of(shape, t);
    size_t i = 0;
    while (i < tiles_.size() && before + cost_of(shape, tiles_[i]) <= total * number / num_threads)
      before += cost_of(shape, tiles_[i++]);
    if (i == tiles_.size()) return;
    const Tile t = tiles_[i];
    const int64_t count = t.tile.token_end - t.tile.token_begin;
    const int64_t positions = num_seen(shape, t, t.first_chunk);
    const int64_t again = positions * reading_cost(shape);
    const int64_t wanted = total * number / num_threads - before;
    // Several chunks divide better than tokens do.
    if (t.num_chunks > 1 || count < 2 || std::min(wanted, cost_of(shape, t) - wanted) <= again)
      continue;
    const int64_t first = ((total + again) * number / num_threads - before - again) /
                          (positions * shape.num_sharing);
    const int64_t cut = t.tile.token_begin + std::clamp<int64_t>(first, 1, count - 1);
    tiles_[i].tile.token_end = cut;
    tiles_.insert(tiles_.begin() + static_cast<int64_t>(i) + 1, t);
    tiles_[i + 1].tile.token_begin = cut;
  }
}

int64_t AttentionWork::num_seen(const Attention& shape, const Tile& t, int64_t chunk) {
  const PositionRange range = seen_by_any(shape, t.tile, chunk * kChunk);
  return std::max<int64_t>(1, range.high - range.low);
}

int64_t AttentionWork::cost_of(const Attention& shape, const Tile& t, int64_t chunk) {
  const int64_t num_rows = (t.tile.token_end - t.tile.token_begin) * shape.num_sharing;
  return num_seen(shape, t, chunk) * (num_rows + reading_cost(shape));
}

int64_t AttentionWork::cost_of(const Attention& shape, const Tile& t) {
  int64_t cost = 0;
  for (int64_t i = 0; i < t.num_chunks; ++i) cost += cost_of(shape, t, t.first_chunk + i);
  return cost;
}

void AttentionWork::add_pieces(const Attention& shape) {
  int64_t cost = 0;
  for (size_t i = 0; i < tiles_.size(); ++i) {
    if (static_cast<int64_t>(i) % tiles_per_group_ == 0) group_items_.push_back(num_items());
    const Tile& t = tiles_[i];
    for (int64_t chunk = t.first_chunk; chunk < t.first_chunk + t.num_chunks; ++chunk) {
      pieces_.push_back({&t.tile, chunk});
      tile_of_.push_back(static_cast<int64_t>(i));
      costs_.push_back(cost);
      cost += cost_of(shape, t, chunk);
    }
  }
  group_items_.push_back(num_items());
  costs_.push_back(cost);
  left_ = std::vector<std::atomic<int64_t>>(tiles_.size());
  for (size_t i = 0; i < tiles_.size(); ++i) left_[i] = tiles_[i].num_chunks;
}

std::pair<int64_t, int64_t> AttentionWork::share(int64_t group, int64_t thread,
                                                 int64_t num_threads) const {
  const auto begin = costs_.begin() + group_items_[static_cast<size_t>(group)];
  const auto end = costs_.begin() + group_items_[static_cast<size_t>(group) + 1];
  // The piece that starts nearest to the thread's part of all.
  const auto first_of = [&](int64_t number) {
    const int64_t wanted = *begin + (*end - *begin) * number / num_threads;
    auto first = std::lower_bound(begin, end, wanted);
    if (first != begin && wanted - *(first - 1) < *first - wanted) --first;
    return first - costs_.begin();
  };
  return {first_of(thread), first_of(thread + 1)};
}

ReadAhead AttentionWork::read_ahead(const Attention& a, int64_t group, int64_t thread,
                                    int64_t num_threads) const {
  const auto [begin, end] = share(group, thread, num_threads);
  ReadAhead ahead;
  ahead.a = &a;
  ahead.next = pieces_.data() + begin;
  ahead.end = pieces_.data() + end;
  ahead.lines_allowed = kLinesAhead;
  return ahead;
}

int64_t AttentionWork::memory_size(int64_t num_threads) const {
  return num_threads * scratch_size_ + tiles_per_group_ * tile_size_;
}

void AttentionWork::run(const Attention& a, int64_t group, float* memory, int64_t thread,
                        int64_t num_threads, ReadAhead& ahead) {
  const auto [begin, end] = share(group, thread, num_threads);
  float* const scratch = memory + thread * scratch_size_;
  float* const all_partials = memory + num_threads * scratch_size_;
  const auto attention_chunk = kernels().attention_chunk;
  for (int64_t i = begin; i < end; ++i) {
    const AttentionPiece& piece = pieces_[static_cast<size_t>(i)];
    const int64_t number = tile_of_[static_cast<size_t>(i)];
    const Tile& tile = tiles_[static_cast<size_t>(number)];
    float* const partials = all_partials + number % tiles_per_group_ * tile_size_;
    attention_chunk(a, piece, scratch, partials + (piece.chunk - tile.first_chunk) * chunk_size_,
                    row_size_, ahead);
    std::atomic<int64_t>& left = left_[static_cast<size_t>(number)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      left.store(tile.num_chunks, std::memory_order_relaxed);  // for the next layer
      finish_tile(a, tile, partials);
    }
  }
}

// Adds up each row's partials over the chunks that the row sees, in order, and writes the result.
// A row may see fewer chunks than its tile: the others do not take part.
void AttentionWork::finish_tile(const Attention& a, const Tile& tile, float* partials) const {
  const Kernels& k = kernels();
  const AttentionTile& t = tile.tile;
  const int64_t num_rows = (t.token_end - t.token_begin) * a.num_sharing;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = t.token_begin + row / a.num_sharing;
    const int64_t low = first_seen(a, token), high = a.visible[token];
    const int64_t first = low < high ? low / kChunk - tile.first_chunk : 0;
    const int64_t last = low < high ? (high - 1) / kChunk - tile.first_chunk : 0;
    float* const state = partials + first * chunk_size_ + row * row_size_;
    for (int64_t chunk = first + 1; chunk <= last; ++chunk)
      k.attention_merge(a, state, partials + chunk * chunk_size_ + row * row_size_);
    k.attention_finish(a, state, token, t.kv_head * a.num_sharing + row % a.num_sharing);
  }
}

}  // namespace dspark
