// What each instruction set offers; who calls it checks arguments and runs threads.
#pragma once

#include <stdint.h>

#include "weight_stream.h"

namespace dspark {

enum class Type { kFloat32, kBFloat16 };

// Outputs are packed in groups of 16 lanes and panels of kPanelGroups groups (the last may have
// fewer). A unit is what one lane holds of a row in 4 bytes: one float32, two bfloat16, four int8.
// Packed order: [panel][unit][group][lane]; a panel is contiguous and is read front to back.
constexpr int64_t kGroup = 16;
constexpr int64_t kPanelGroups = 2;  // 32 outputs: in bfloat16, one line of memory

enum class Weights { kFloat32, kBFloat16, kInt8 };

struct Linear {
  Weights weights;
  Type out_type;
  const char* packed;
  int64_t num_units;  // of the inputs, padded
  int64_t num_outputs;
  const char* x;  // [tokens][units]: for int8 weights, uint8 values shifted by 128
  int64_t x_stride;  // bytes
  int64_t num_tokens;
  const float* bias;  // may be null
  const float* token_scales;  // the last three only with int8 weights
  const float* output_scales;
  const int32_t* output_sums;
  char* out;
  int64_t out_stride;  // elements
  WeightStream* stream;  // if not null, the weights are what is read next of it
};

// Attention of rows (token, head) that share one key/value head; positions are cut into chunks
// at multiples of kChunk, so that the order of a sum depends on absolute positions only.
constexpr int64_t kChunk = 512;
constexpr int64_t kTileRows = 48;  // at most, unless one token has more heads than that

struct Attention {
  Type type;  // of q and out, and of keys and values unless they are bytes
  bool has_bytes;
  const char* q;
  const char* k_pages;
  const char* v_pages;
  char* out;
  int64_t q_strides[2];  // token, head; all strides in elements, the last dimension contiguous
  int64_t k_strides[3];  // page, head, row; with bytes: page, head, block, in bytes
  int64_t v_strides[3];
  int64_t out_strides[2];
  int64_t page_size;
  int64_t head_dim;
  int64_t num_sharing;  // query heads per key/value head
  const int32_t* visible;
  const int64_t* positions;
  int64_t window;  // 0: none
  float scale;
  float softcap;  // 0: none
  const float* sinks;  // may be null
};

// Tokens of one request and the heads that share a key/value head.
struct AttentionTile {
  const int32_t* block_table;
  int64_t token_begin, token_end;
  int64_t kv_head;
};

struct PositionRange {
  int64_t low, high;
};

// One chunk of positions for a tile: what a thread computes at a time.
struct AttentionPiece {
  const AttentionTile* tile;
  int64_t chunk;
};

// How far a thread has asked for the keys and values of its pieces, see read_ahead.h. Whoever reads
// a line allows one more, so that the distance stays.
struct ReadAhead {
  const Attention* a = nullptr;
  const AttentionPiece* next = nullptr;  // after the one asked for now
  const AttentionPiece* end = nullptr;
  int64_t lines_allowed = 0;
  const AttentionPiece* piece = nullptr;
  PositionRange range = {0, 0};  // of the piece, from the chunk's start
  int64_t position = 0;
  bool is_at_keys = false;
  const char* at = nullptr;
  const char* rows_end = nullptr;
};

inline int64_t padded_head_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
// Keys and values as int8, a float32 scale for each position and head: blocks of 16 positions in
// lines of 64 bytes, four bytes for each of 16 lanes, then a line of the scales.
//   keys:   line i: values 4 i.. of every position, a position to a lane; shifted by 128
//   values: line (i, j): positions 4 i.. of values 16 j.., a value to a lane
constexpr int64_t kBytePositions = 16;
inline int64_t byte_block_size(int64_t head_dim) { return (padded_head_dim(head_dim) / 4 + 1) * 64; }

// Partial result of one row over one chunk: padded head_dim values, then maximum and sum.
inline int64_t partial_size(int64_t head_dim) { return padded_head_dim(head_dim) + kGroup; }

// Probabilities of a row are summed in blocks of this many columns: whole panels of a product.
constexpr int64_t kBlock = 16 * kGroup * kPanelGroups;

// The largest of some columns and the lowest of those that hold it; NaN is passed over but told.
struct Best {
  float value;
  int64_t column;
  bool has_nan;
};

// A row of logits as scores (x - shift) / temperature.
struct Scores {
  Type type;
  const char* x;
  float shift;
  float temperature;
};

// The best column of a draw so far, with its noise.
struct Draw {
  double score;
  int64_t column;
};

#define DSPARK_DECLARE(isa)                                                                       \
  namespace isa {                                                                                 \
  void linear(const Linear&, int64_t panel_begin, int64_t panel_end);                             \
  void quantize_row(Type, const char* x, int64_t width, uint8_t* out, int64_t padded, float* scale); \
  void place_bytes(const Attention&, bool is_key, const char* row, char* block, int64_t lane);    \
  int64_t attention_scratch(const Attention&, int64_t num_rows);                                  \
  void attention_chunk(const Attention&, const AttentionPiece&, float* scratch, float* partials,  \
                       int64_t row_stride, ReadAhead&);                                           \
  void attention_merge(const Attention&, float* state, const float* partial);                     \
  void attention_finish(const Attention&, const float* state, int64_t token, int64_t head);       \
  void rms_norm(Type, const char* x, const char* weight, char* out, int64_t width, float eps);    \
  void silu_mul(Type, const char* gate, const char* up, char* out, int64_t width);                \
  void rotate(Type, char* x, Type table_type, const char* cos, const char* sin, int64_t dim);     \
  Best best(Type, const char* x, int64_t width);                                                  \
  Draw shared_draw(const Scores&, int64_t begin, int64_t end, uint64_t key,                       \
                   const int64_t* tokens);                                                        \
  float exponential_block(const Scores&, int64_t begin, int64_t end, float* out);                 \
  void divide(float* x, int64_t width, float by);                                                 \
  void clamp_at_zero(float* x, int64_t width);                                                    \
  double block_sum(const float* x, int64_t width);                                                \
  void score_row(const Scores&, int64_t width, float* out);                                       \
  int64_t count_from(const float* x, int64_t width, float floor);                                 \
  void keep_from(float* x, int64_t width, float floor);                                           \
  int64_t gather_from(const float* x, int64_t width, float floor, float* out);                    \
  void part_maxima(const float* x, int64_t width, float* maxima, int64_t num_parts);              \
  void add_row(Type, const char* from, char* to, int64_t width);                                  \
  float dot(Type, const char* x, const float* weights, int64_t width);                            \
  uint32_t sum_words(const char* x, int64_t size);                                                \
  }

DSPARK_DECLARE(avx2)
DSPARK_DECLARE(avx512)
DSPARK_DECLARE(avx512vnni)
DSPARK_DECLARE(avx512bf16)
DSPARK_DECLARE(amx)

}  // namespace dspark
