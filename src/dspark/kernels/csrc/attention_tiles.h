// Chunks of positions in bfloat16 by tile registers (AMX), for head sizes that are multiples of 32.
// Keys and values are read as they lie. Scores are keys times queries. A tile product adds up
// neighbouring values of a row, which for values of a head must stay apart: each weight, rounded
// to bfloat16, therefore meets them twice, with a zero after it and with a zero before it.
#pragma once

#include "attention_rows.h"

#if defined(__AMX_TILE__)

namespace dspark {
namespace DSPARK_ISA {
namespace {

constexpr int64_t kTile = 16;  // rows, and 4-byte units of a row
constexpr int64_t kStep = 2 * kTile;  // values of a head in the rows of one tile
constexpr int64_t kFewRows = 4;
constexpr int64_t kChunkTiles = kChunk / kTile;
constexpr int64_t kTileSize = kTile * kTile;  // units
// Lines asked for at most, see ReadAhead: evenly over time. A block reads 32, and what it does not
// ask for, the weights do: memory would have nothing to do while they are computed.
constexpr int64_t kLinesPerTile = 20, kLinesPerWeights = 7;
constexpr int64_t kWeightRow = 2 * kChunk;  // units of a row: both forms of its weights

struct TileScratch {
  uint32_t* q;  // [rows / 16][units][16]
  float* scores;  // [rows][2][kChunk], then weights before a zero and behind one
  float* sums;  // [kChunk / 16] tiles
  uint16_t* copies;  // [kChunk][head_dim]
  uint16_t* nothing;  // a row of zeros

  static int64_t padded(int64_t num_rows) { return (num_rows + kTile - 1) / kTile * kTile; }
  TileScratch(float* memory, int64_t num_rows, int64_t head_dim) {
    const int64_t rows = padded(num_rows);
    q = reinterpret_cast<uint32_t*>(memory);
    scores = memory + rows * head_dim / 2;
    sums = scores + rows * kWeightRow;
    copies = reinterpret_cast<uint16_t*>(sums + kChunkTiles * kTileSize);
    nothing = copies + kChunk * head_dim;
  }
  static int64_t size(int64_t num_rows, int64_t head_dim) {
    const int64_t rows = padded(num_rows);
    return rows * head_dim / 2 + rows * kWeightRow + kChunkTiles * kTileSize +
           (kChunk + 1) * head_dim / 2;
  }
};

// Tiles 0-3: results of rows, two of each; 4, 6: their weights; 5, 7: keys or values. While scores
// are computed, 6 holds queries and 7 the scores.
struct alignas(64) AttentionTiles {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure_few(int64_t num_rows) {
  AttentionTiles config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i < 5 ? 2 * num_rows : kTile);
    config.row_bytes[i] = static_cast<uint16_t>(i < 6 ? 64 : 4 * kFewRows);
  }
  // The intrinsic tells the compiler of the first 8 bytes only.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void configure_many() {
  AttentionTiles config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = kTile;
    config.row_bytes[i] = 64;
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Units of up to 16 rows of q side by side, zeros for those that are not there.
void load_queries(const Attention& a, const AttentionTile& tile, int64_t first_row,
                  int64_t num_rows, const uint16_t* nothing, uint32_t* out) {
  const uint16_t* rows[kTile];
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t row = first_row + i;
    const int64_t token = tile.token_begin + row / a.num_sharing;
    const int64_t head = tile.kv_head * a.num_sharing + row % a.num_sharing;
    rows[i] = i < num_rows ? reinterpret_cast<const uint16_t*>(a.q) + token * a.q_strides[0] +
                                 head * a.q_strides[1]
                           : nothing;
  }
  for (int64_t e = 0; e < a.head_dim; e += kStep) {
    Floats values[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) values[i] = as_floats(load_words(rows[i] + e));
    transpose(values);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) store_words(out + (e / 2 + i) * kTile, as_words(values[i]));
  }
}

// Rows of a chunk's positions by sixteens, in their page or copied.
struct Blocks {
  const char* rows[kChunkTiles];
  int64_t stride[kChunkTiles];  // bytes
};

// `range`: positions that anybody sees, from `start` on. Copied are those that do not lie in one
// page and, with `without_unseen`, those that nobody sees: zeros take their place.
Blocks blocks_of(const Attention& a, const AttentionTile& tile, const char* pages,
                 const int64_t strides[3], const TileScratch& s, int64_t start, Range range,
                 bool without_unseen) {
  Blocks out;
  const bool has_whole = a.page_size % kTile == 0;
  const int64_t first = range.low / kTile * kTile;
  RowWalk at(a, tile, strides, start + (has_whole ? first : range.low));
  const size_t row_bytes = static_cast<size_t>(a.head_dim) * 2;
  for (int64_t block = first; block < range.high; block += kTile) {
    const char* rows = has_whole ? pages + at.offset() * 2 : nullptr;
    int64_t stride = strides[2] * 2;
    const bool is_seen = block >= range.low && block + kTile <= range.high;
    if (!has_whole || (without_unseen && !is_seen)) {
      char* const copy = reinterpret_cast<char*>(s.copies + block * a.head_dim);
      for (int64_t i = 0; i < kTile; ++i) {
        const char* from = reinterpret_cast<const char*>(s.nothing);
        if (block + i >= range.low && block + i < range.high) {
          from = has_whole ? rows + i * stride : pages + at.offset() * 2;
          if (!has_whole) at.next();
        }
        memcpy(copy + static_cast<size_t>(i) * row_bytes, from, row_bytes);
      }
      rows = copy;
      stride = a.head_dim * 2;
    }
    if (has_whole) at.next(kTile);
    out.rows[block / kTile] = rows;
    out.stride[block / kTile] = stride;
  }
  return out;
}

// [16 keys][4 rows] to [row][16 keys], times the scale.
DSPARK_INLINE void spread_few(const float* sums, Floats scale, float* scores) {
  const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
  const Floats a = load(sums), b = load(sums + 16), c = load(sums + 32), d = load(sums + 48);
  const Floats ab01 = _mm512_permutex2var_ps(a, even, b);
  const Floats cd01 = _mm512_permutex2var_ps(c, even, d);
  const Floats ab23 = _mm512_permutex2var_ps(a, odd, b);
  const Floats cd23 = _mm512_permutex2var_ps(c, odd, d);
  store(scores, mul(_mm512_shuffle_f32x4(ab01, cd01, 0x44), scale));
  store(scores + kWeightRow, mul(_mm512_shuffle_f32x4(ab01, cd01, 0xee), scale));
  store(scores + 2 * kWeightRow, mul(_mm512_shuffle_f32x4(ab23, cd23, 0x44), scale));
  store(scores + 3 * kWeightRow, mul(_mm512_shuffle_f32x4(ab23, cd23, 0xee), scale));
}

DSPARK_INLINE void spread_all(const float* sums, Floats scale, float* scores) {
  Floats values[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) values[i] = load(sums + i * kTile);
  transpose(values);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) store(scores + i * kWeightRow, mul(values[i], scale));
}

// Scores of a chunk's keys for all rows. Products are stored as they come and spread together: a
// load that follows a narrower store at once has to wait for it.
void score_keys(const Attention& a, const TileScratch& s, const Blocks& keys, Range blocks,
                int64_t num_rows, ReadAhead& ahead) {
  const Floats scale = splat(a.scale);
  const bool has_few = num_rows <= kFewRows;
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const char* const q = reinterpret_cast<const char*>(s.q + row * a.head_dim / 2);
    for (int64_t b = blocks.low; b < blocks.high; ++b) {
      if (row == 0) ahead.lines_allowed += a.head_dim / kStep * kTile;  // lines of this one
      ask(ahead, kLinesPerTile);
      _tile_zero(7);
      for (int64_t e = 0; e < a.head_dim; e += kStep) {
        _tile_loadd(5, keys.rows[b] + e * 2, keys.stride[b]);
        _tile_loadd(6, q + e * 32, 64);
        _tile_dpbf16ps(7, 5, 6);
      }
      _tile_stored(7, s.sums + b * kTileSize, has_few ? 4 * kFewRows : 64);
    }
    for (int64_t b = blocks.low; b < blocks.high; ++b) {
      float* const scores = s.scores + row * kWeightRow + b * kTile;
      if (has_few) spread_few(s.sums + b * kTileSize, scale, scores);
      else spread_all(s.sums + b * kTileSize, scale, scores);
    }
  }
}

// Sums of weight times value for kHalves times 8 rows (or the few) and kCols times 32 values.
template <int kHalves, int kCols>
void add_tiles(const TileScratch& s, const Blocks& values, Range blocks, int64_t row,
               int64_t count, int64_t e, ReadAhead& ahead, float* out, int64_t out_stride) {
  const char* const weights = reinterpret_cast<const char*>(s.scores + row * kWeightRow);
  constexpr int64_t kStride = kChunk * 4, kHalf = 16 * kStride;
  _tile_zero(0);
  if constexpr (kCols == 2) _tile_zero(1);
  if constexpr (kHalves == 2) _tile_zero(2);
  if constexpr (kHalves == 2 && kCols == 2) _tile_zero(3);
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    if (row == 0) ahead.lines_allowed += kCols * kTile;  // a line of each row
    ask(ahead, kLinesPerTile);
    const char* const v = values.rows[b] + e * 2;
    _tile_loadd(4, weights + b * 64, kStride);
    _tile_loadd(5, v, values.stride[b]);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kHalves == 2) {
      _tile_loadd(6, weights + kHalf + b * 64, kStride);
      _tile_dpbf16ps(2, 6, 5);
    }
    if constexpr (kCols == 2) {
      if constexpr (kHalves == 2) {
        _tile_loadd(7, v + 64, values.stride[b]);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 6, 7);
      } else {
        _tile_loadd(5, v + 64, values.stride[b]);
        _tile_dpbf16ps(1, 4, 5);
      }
    }
  }
  _tile_stored(0, s.sums, 64);
  if constexpr (kCols == 2) _tile_stored(1, s.sums + kTileSize, 64);
  if constexpr (kHalves == 2) _tile_stored(2, s.sums + 2 * kTileSize, 64);
  if constexpr (kHalves == 2 && kCols == 2) _tile_stored(3, s.sums + 3 * kTileSize, 64);
  const __m512i first =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < kCols; ++c) {
      const float* const sums = s.sums + (r / 8 * 2 + c) * kTileSize + r % 8 * 2 * kTile;
      const Floats even = load(sums), odd = load(sums + kTile);
      float* const at = out + r * out_stride + e + c * kStep;
      store(at, _mm512_permutex2var_ps(even, first, odd));
      store(at + kTile, _mm512_permutex2var_ps(even, second, odd));
    }
}

template <int kHalves>
void add_values(const Attention& a, const TileScratch& s, const Blocks& values, Range blocks,
                int64_t row, int64_t count, ReadAhead& ahead, float* out, int64_t out_stride) {
  int64_t e = 0;
  for (; e + 2 * kStep <= a.head_dim; e += 2 * kStep)
    add_tiles<kHalves, 2>(s, values, blocks, row, count, e, ahead, out, out_stride);
  if (e < a.head_dim)
    add_tiles<kHalves, 1>(s, values, blocks, row, count, e, ahead, out, out_stride);
}

void weigh_rows(const Attention& a, const AttentionTile& tile, const TileScratch& s, int64_t start,
                Range blocks, int64_t num_rows, ReadAhead& ahead, float* partials,
                int64_t row_stride) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const Range row = seen(a, tile.token_begin + r / a.num_sharing);
    float* const scores = s.scores + r * kWeightRow;
    float* const end = partials + r * row_stride + padded_head_dim(a.head_dim);
    const auto keep = [&](int64_t at, Floats weight) {
      const Words rounded =
          _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight)));
      store_words(scores + at, rounded);
      store_words(scores + kChunk + at, _mm512_slli_epi32(rounded, 16));
      ask(ahead, kLinesPerWeights);
    };
    weigh(a, scores, blocks, {row.low - start, row.high - start}, end, end + 1, keep);
  }
}

void chunk_of_tiles(const Attention& a, const AttentionPiece& piece, float* memory,
                    float* partials, int64_t row_stride, ReadAhead& ahead) {
  const AttentionTile& tile = *piece.tile;
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = piece.chunk * kChunk;
  const Range range = seen_by_any(a, tile, start);
  if (range.low >= range.high) return sees_nothing(a, num_rows, partials, row_stride);
  const TileScratch s(memory, num_rows, a.head_dim);
  memset(s.nothing, 0, static_cast<size_t>(a.head_dim) * 2);
  for (int64_t row = 0; row < num_rows; row += kTile)
    load_queries(a, tile, row, smaller(kTile, num_rows - row), s.nothing,
                 s.q + row * a.head_dim / 2);
  if (num_rows <= kFewRows) configure_few(num_rows);
  else configure_many();
  const Range blocks = {range.low / kTile, (range.high + kTile - 1) / kTile};
  const Blocks keys = blocks_of(a, tile, a.k_pages, a.k_strides, s, start, range, false);
  score_keys(a, s, keys, blocks, num_rows, ahead);
  weigh_rows(a, tile, s, start, blocks, num_rows, ahead, partials, row_stride);
  const Blocks values = blocks_of(a, tile, a.v_pages, a.v_strides, s, start, range, true);
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const int64_t count = smaller(kTile, num_rows - row);
    float* const out = partials + row * row_stride;
    if (count <= kTile / 2)
      add_values<1>(a, s, values, blocks, row, count, ahead, out, row_stride);
    else
      add_values<2>(a, s, values, blocks, row, count, ahead, out, row_stride);
  }
  _tile_release();
}

}  // namespace
}  // namespace DSPARK_ISA
}  // namespace dspark

#endif
