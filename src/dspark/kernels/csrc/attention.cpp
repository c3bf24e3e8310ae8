// One chunk of positions for the rows (tokens x sharing heads) of one key/value head.
// A row's result over a chunk depends on the row and the positions that it sees: scores add over
// the head dimension in order, weights add by (position mod 16), values add by position, and a
// position that only another row sees adds an exact zero.
#include "kernels.h"
#include "vector.h"

// Processors with tile registers use those, or do two float32 products in a cycle and a pair in two;
// the others with AVX512-BF16 (AMD's) do two pairs.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
#define DSPARK_USES_PAIRS 1
#else
#define DSPARK_USES_PAIRS 0
#endif

namespace dspark {
namespace DSPARK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 6;  // 6 x 4 accumulators, 4 operands, 1 broadcast of 32 registers
constexpr int kBlocks = 4;
#else
constexpr int kRows = 5;
constexpr int kBlocks = 1;
#endif
constexpr int64_t kKeyStride = kBlocks * kLanes;  // words from one unit to the next of keys
constexpr float kLowest = -1e30f;  // below any score; its weight is exactly 0

struct Range {
  int64_t low, high;
};

DSPARK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
DSPARK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

Range seen(const Attention& a, int64_t token) {
  const int64_t low = a.window > 0 ? larger(0, a.positions[token] + 1 - a.window) : 0;
  return {low, a.visible[token]};
}

// Where the thread's scratch memory holds what. A unit is 4 bytes of a row: one value as float32,
// or two as bfloat16.
struct Scratch {
  float* q;  // [rows][units, padded]
  float* keys;  // [units][kBlocks * 16] of a few blocks, transposed
  float* scores;  // [rows][kChunk], then weights
  float* nothing;  // a row of zeros
  uint16_t* weight_pairs;  // [rows][kChunk]
  int64_t* k_offsets;  // [kChunk], elements from the pages' start
  int64_t* v_offsets;

  Scratch(float* memory, int64_t num_rows, int64_t padded) {
    q = memory;
    keys = q + num_rows * padded;
    scores = keys + padded * kKeyStride;
    nothing = scores + num_rows * kChunk;
    weight_pairs = reinterpret_cast<uint16_t*>(nothing + padded);
    k_offsets = reinterpret_cast<int64_t*>(weight_pairs + num_rows * kChunk);
    v_offsets = k_offsets + kChunk;
  }
  static int64_t size(int64_t num_rows, int64_t padded) {
    return num_rows * padded + padded * kKeyStride + num_rows * kChunk + padded +
           num_rows * kChunk / 2 + 4 * kChunk;
  }
};

#if defined(__AVX512F__)
// 16 x 16 values of 4 bytes.
DSPARK_INLINE void transpose(Floats rows[kLanes]) {
  __m512 a[kLanes], b[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {  // pairs of rows
    a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {  // fours
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: columns i, i + 4, i + 8, i + 12
    const __m512 c0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    const __m512 c1 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    const __m512 c2 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    const __m512 c3 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(c0, c1, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(c0, c1, 0xdd);
    rows[i + 4] = _mm512_shuffle_f32x4(c2, c3, 0x88);
    rows[i + 12] = _mm512_shuffle_f32x4(c2, c3, 0xdd);
  }
}
#else
DSPARK_INLINE void transpose(Floats rows[kLanes]) {
  float values[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(values[i], rows[i]);
  for (int i = 0; i < kLanes; ++i) {
    float column[kLanes];
    for (int j = 0; j < kLanes; ++j) column[j] = values[j][i];
    rows[i] = load(column);
  }
}
#endif

#if defined(__AVX512F__)
// 32 values of 2 bytes are 16 of 4 bytes: one transposition serves twice as many.
DSPARK_INLINE void transpose_two(const uint16_t* const rows[kLanes], int64_t e, float* out) {
  Floats values[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) values[i] = as_floats(load_words(rows[i] + e));
  transpose(values);
  const Words high = splat_word(static_cast<int32_t>(0xffff0000));
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    float* at = out + (e + 2 * i) * kKeyStride;
    store(at, as_floats(_mm512_slli_epi32(as_words(values[i]), 16)));
    store(at + kKeyStride, as_floats(_mm512_and_si512(as_words(values[i]), high)));
  }
}
#endif

// Arithmetic in float32 on rows of T.
template <class T>
struct Singles {
  using Value = T;
  static constexpr bool kStoresPairs = false;
  static int64_t num_units(int64_t head_dim) { return head_dim; }

  static void load_query(const T* q, int64_t head_dim, float* out) {
    for (int64_t e = 0; e < head_dim; e += kLanes) {
      const int64_t count = head_dim - e;
      store(out + e, count >= kLanes ? load(q + e) : load_some(q + e, count));
    }
  }

  // Rows of 16 keys to out[unit][lane].
  static void transpose_keys(const T* const rows[kLanes], int64_t head_dim, float* out) {
    int64_t e = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2)
      for (; e + 2 * kLanes <= head_dim; e += 2 * kLanes) transpose_two(rows, e, out);
#endif
    for (; e < head_dim; e += kLanes) {
      const int64_t count = smaller(kLanes, head_dim - e);
      Floats values[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        values[i] = count == kLanes ? load(rows[i] + e) : load_some(rows[i] + e, count);
      transpose(values);
      for (int64_t i = 0; i < count; ++i) store(out + (e + i) * kKeyStride, values[i]);
    }
  }

  DSPARK_INLINE Floats score(Floats sum, Words q, Words key) {
    return fma(as_floats(q), as_floats(key), sum);
  }
};

#if DSPARK_USES_PAIRS
// Products of bfloat16 pairs, added in float32: half the instructions, for head sizes that are
// multiples of 32. Weights are rounded to bfloat16.
struct Pairs {
  using Value = uint16_t;
  static constexpr bool kStoresPairs = true;
  static int64_t num_units(int64_t head_dim) { return head_dim / 2; }

  static void load_query(const uint16_t* q, int64_t head_dim, float* out) {
    memcpy(out, q, static_cast<size_t>(head_dim) * sizeof *q);
  }

  static void transpose_keys(const uint16_t* const rows[kLanes], int64_t head_dim, float* out) {
    for (int64_t e = 0; e < head_dim; e += 2 * kLanes) {
      Floats values[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) values[i] = as_floats(load_words(rows[i] + e));
      transpose(values);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (e / 2 + i) * kKeyStride, values[i]);
    }
  }

  DSPARK_INLINE Floats score(Floats sum, Words q, Words key) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(q), reinterpret_cast<__m512bh>(key));
  }
};
#endif

template <class P, int kNumRows>
void score_tile(const Attention& a, const float* q, int64_t padded, const float* keys,
                float* scores) {
  Floats sums[kNumRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = zero();
  const int64_t num_units = P::num_units(a.head_dim);
  for (int64_t unit = 0; unit < num_units; ++unit) {
    Words k[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) k[b] = load_words(keys + unit * kKeyStride + b * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      int32_t bits;
      memcpy(&bits, q + r * padded + unit, sizeof bits);
      const Words x = splat_word(bits);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sums[r][b] = P::score(sums[r][b], x, k[b]);
    }
  }
  const Floats scale = splat(a.scale);
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      store(scores + r * kChunk + b * kLanes, mul(sums[r][b], scale));
}

template <class P>
void score_rows(const Attention& a, const float* q, int64_t padded, const float* keys,
                float* scores, int64_t num_rows) {
  switch (num_rows) {
    case 1:
      return score_tile<P, 1>(a, q, padded, keys, scores);
    case 2:
      return score_tile<P, 2>(a, q, padded, keys, scores);
    case 3:
      return score_tile<P, 3>(a, q, padded, keys, scores);
    case 4:
      return score_tile<P, 4>(a, q, padded, keys, scores);
    case 5:
      return score_tile<P, 5>(a, q, padded, keys, scores);
    default:
      return score_tile<P, kRows>(a, q, padded, keys, scores);
  }
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1).
DSPARK_INLINE Floats soft_cap(Floats x, float cap) {
  const Floats y = mul(x, splat(2.0f / cap));
  const Floats bounded = max(splat(-80.0f), sub(zero(), max(splat(-80.0f), sub(zero(), y))));
  const Floats tanh = sub(splat(1.0f), div(splat(2.0f), add(exp(bounded), splat(1.0f))));
  return mul(tanh, splat(cap));
}

DSPARK_INLINE Floats lane_numbers(int64_t first) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(first + i);
  return load(values);
}

// Scores of one row to weights, in place; the row sees positions [low, high) of the chunk.
template <bool kStoresPairs>
void weigh(const Attention& a, float* scores, uint16_t* pairs, Range blocks, Range row,
           float* maximum, float* sum) {
  const Floats low = splat(static_cast<float>(row.low));
  const Floats last = splat(static_cast<float>(row.high - 1));
  const Floats lowest = splat(kLowest);
  Floats largest = lowest;
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    Floats x = load(scores + b * kLanes);
    if (a.softcap > 0) x = soft_cap(x, a.softcap);
    if (b * kLanes < row.low || (b + 1) * kLanes > row.high) {
      const Floats lane = lane_numbers(b * kLanes);
      x = if_ge(lane, low, x, lowest);
      x = if_ge(last, lane, x, lowest);
    }
    store(scores + b * kLanes, x);
    largest = max(largest, x);
  }
  const float m = max_lanes(largest);
  const Floats base = splat(m <= kLowest ? 0.0f : m);  // a row that sees nothing: all weights 0
  Floats total = zero();
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    const Floats p = exp(sub(load(scores + b * kLanes), base));
    store(scores + b * kLanes, p);
    if constexpr (kStoresPairs) store(pairs + b * kLanes, p);
    total = add(total, p);
  }
  *maximum = m;
  *sum = sum_lanes(total);
}

// Sums of weight times value for kNumRows rows and kWidth times 16 values from e on.
template <class T, int kNumRows, int kWidth>
void value_tile(const Attention& a, const Scratch& s, int64_t first_row, Range range, int64_t e,
                float* out, int64_t out_stride) {
  const T* pages = reinterpret_cast<const T*>(a.v_pages) + e;
  const float* weights = s.scores + first_row * kChunk;
  const int64_t count = a.head_dim - e;  // of the last 16; only looked at if it is below 16
  Floats sums[kNumRows][kWidth];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < kWidth; ++w) sums[r][w] = zero();
  for (int64_t j = range.low; j < range.high; ++j) {
    const T* row = pages + s.v_offsets[j];
    Floats v[kWidth];
#pragma GCC unroll 4
    for (int w = 0; w < kWidth; ++w)
      v[w] = kWidth == 1 && count < kLanes ? load_some(row, count) : load(row + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      const Floats p = splat(weights[r * kChunk + j]);
#pragma GCC unroll 4
      for (int w = 0; w < kWidth; ++w) sums[r][w] = fma(p, v[w], sums[r][w]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < kWidth; ++w) store(out + r * out_stride + e + w * kLanes, sums[r][w]);
}

template <int kNumRows, class T>
void value_rows(Singles<T>, const Attention& a, const Scratch& s, int64_t first_row,
                Range range, float* out, int64_t out_stride) {
  int64_t e = 0;
  for (; e + kBlocks * kLanes <= a.head_dim; e += kBlocks * kLanes)
    value_tile<T, kNumRows, kBlocks>(a, s, first_row, range, e, out, out_stride);
  for (; e < a.head_dim; e += kLanes)
    value_tile<T, kNumRows, 1>(a, s, first_row, range, e, out, out_stride);
}

#if DSPARK_USES_PAIRS
// The same for kWidth times 32 values, two positions (the first one even) at a time.
template <int kNumRows, int kWidth>
void value_pairs(const Attention& a, const Scratch& s, int64_t first_row, Range range, int64_t e,
                 float* out, int64_t out_stride) {
  const uint16_t* pages = reinterpret_cast<const uint16_t*>(a.v_pages) + e;
  const uint16_t* nothing = reinterpret_cast<const uint16_t*>(s.nothing);
  const uint16_t* weights = s.weight_pairs + first_row * kChunk;
  Floats sums[kNumRows][kWidth][2];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) sums[r][w][0] = sums[r][w][1] = zero();
  for (int64_t j = range.low / 2 * 2; j < range.high; j += 2) {
    const uint16_t* even = j >= range.low ? pages + s.v_offsets[j] : nothing;
    const uint16_t* odd = j + 1 < range.high ? pages + s.v_offsets[j + 1] : nothing;
    Words v[kWidth][2];
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
      const Words x = load_words(even + w * 2 * kLanes);
      const Words y = load_words(odd + w * 2 * kLanes);
      v[w][0] = _mm512_unpacklo_epi16(x, y);
      v[w][1] = _mm512_unpackhi_epi16(x, y);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      int32_t bits;
      memcpy(&bits, weights + r * kChunk + j, sizeof bits);
      const __m512bh p = reinterpret_cast<__m512bh>(splat_word(bits));
#pragma GCC unroll 2
      for (int w = 0; w < kWidth; ++w)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
          sums[r][w][h] =
              _mm512_dpbf16_ps(sums[r][w][h], p, reinterpret_cast<__m512bh>(v[w][h]));
    }
  }
  // Unpacking works by 128-bit lane: of 32 values, the two registers hold fours in turn.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
      float* at = out + r * out_stride + e + w * 2 * kLanes;
      store(at, _mm512_permutex2var_ps(sums[r][w][0], first, sums[r][w][1]));
      store(at + kLanes, _mm512_permutex2var_ps(sums[r][w][0], second, sums[r][w][1]));
    }
}

template <int kNumRows>
void value_rows(Pairs, const Attention& a, const Scratch& s, int64_t first_row,
                Range range, float* out, int64_t out_stride) {
  int64_t e = 0;
  for (; e + 4 * kLanes <= a.head_dim; e += 4 * kLanes)
    value_pairs<kNumRows, 2>(a, s, first_row, range, e, out, out_stride);
  if (e < a.head_dim) value_pairs<kNumRows, 1>(a, s, first_row, range, e, out, out_stride);
}
#endif

template <class P>
void add_values(const Attention& a, const Scratch& s, Range range, int64_t num_rows, float* out,
                int64_t out_stride) {
  for (int64_t row = 0; row < num_rows; row += kRows) {
    float* at = out + row * out_stride;
    switch (smaller(kRows, num_rows - row)) {
#define DSPARK_CASE(n)                                            \
  case n:                                                         \
    value_rows<n>(P(), a, s, row, range, at, out_stride);        \
    break;
      DSPARK_CASE(1)
      DSPARK_CASE(2)
      DSPARK_CASE(3)
      DSPARK_CASE(4)
      DSPARK_CASE(5)
#undef DSPARK_CASE
      default:
        value_rows<kRows>(P(), a, s, row, range, at, out_stride);
    }
  }
}

// Positions of the chunk that any row of the tile sees, counted from the chunk's start.
Range seen_by_any(const Attention& a, const AttentionTile& tile, int64_t start) {
  Range range = {kChunk, 0};
  for (int64_t token = tile.token_begin; token < tile.token_end; ++token) {
    const Range r = seen(a, token);
    range.low = smaller(range.low, larger(r.low - start, 0));
    range.high = larger(range.high, smaller(r.high - start, kChunk));
  }
  return range;
}

// Where the rows of consecutive positions lie; a division for each would cost as much as reading.
class RowWalk {
 public:
  RowWalk(const Attention& a, const AttentionTile& tile, const int64_t strides[3],
          int64_t position)
      : a_(a), table_(tile.block_table + position / a.page_size), strides_(strides),
        head_(tile.kv_head * strides[1]), row_(position % a.page_size) {}

  // Elements from the pages' start.
  int64_t offset() const {
    return *table_ * strides_[0] + head_ + row_ * strides_[2];
  }
  void next(int64_t count = 1) {  // within a page if more than one
    row_ += count;
    if (row_ >= a_.page_size) {
      row_ = 0;
      ++table_;
    }
  }

 private:
  const Attention& a_;
  const int32_t* table_;
  const int64_t* strides_;
  int64_t head_, row_;
};

// Asks for rows of the pages that will be read soon.
template <class T>
DSPARK_INLINE void prefetch_row(const char* pages, int64_t offset, int64_t head_dim) {
  const char* row = pages + offset * static_cast<int64_t>(sizeof(T));
  for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += 64)
    _mm_prefetch(row + byte, _MM_HINT_T0);
}

template <class P>
void score_chunk(const Attention& a, const Scratch& s, Range range, int64_t num_rows) {
  using T = typename P::Value;
  const int64_t padded = padded_head_dim(a.head_dim);
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  for (int64_t b = blocks.low / kBlocks * kBlocks; b < blocks.high; b += kBlocks) {
    const int64_t next = smaller((b + kBlocks) * kLanes, range.high);
    for (int64_t j = next; j < smaller(next + kKeyStride, range.high); ++j)
      prefetch_row<T>(a.k_pages, s.k_offsets[j], a.head_dim);
    for (int64_t j = larger(b * kLanes, range.low); j < next; ++j)
      prefetch_row<T>(a.v_pages, s.v_offsets[j], a.head_dim);
    for (int64_t i = b; i < b + kBlocks; ++i) {
      const T* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t j = i * kLanes + lane;
        rows[lane] = j >= range.low && j < range.high
                         ? reinterpret_cast<const T*>(a.k_pages) + s.k_offsets[j]
                         : reinterpret_cast<const T*>(s.nothing);
      }
      if (i < blocks.high) P::transpose_keys(rows, a.head_dim, s.keys + (i - b) * kLanes);
    }
    for (int64_t r = 0; r < num_rows; r += kRows)
      score_rows<P>(a, s.q + r * padded, padded, s.keys, s.scores + r * kChunk + b * kLanes,
                    smaller(kRows, num_rows - r));
  }
}

void sees_nothing(const Attention& a, int64_t num_rows, float* partials, int64_t row_stride) {
  const int64_t padded = padded_head_dim(a.head_dim);
  for (int64_t r = 0; r < num_rows; ++r) {
    memset(partials + r * row_stride, 0, static_cast<size_t>(padded + 2) * sizeof(float));
    partials[r * row_stride + padded] = kLowest;
  }
}

template <class P>
void chunk_of(const Attention& a, const AttentionTile& tile, int64_t chunk, float* memory,
              float* partials, int64_t row_stride, const AttentionTile* next_tile,
              int64_t next_chunk) {
  using T = typename P::Value;
  const int64_t padded = padded_head_dim(a.head_dim);
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = chunk * kChunk;
  const Scratch s(memory, num_rows, padded);
  const Range range = seen_by_any(a, tile, start);
  if (range.low >= range.high) return sees_nothing(a, num_rows, partials, row_stride);
  memset(s.nothing, 0, static_cast<size_t>(padded) * sizeof(float));
  RowWalk keys(a, tile, a.k_strides, start + range.low);
  RowWalk values(a, tile, a.v_strides, start + range.low);
  for (int64_t j = range.low; j < range.high; ++j, keys.next(), values.next()) {
    s.k_offsets[j] = keys.offset();
    s.v_offsets[j] = values.offset();
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t token = tile.token_begin + r / a.num_sharing;
    const int64_t head = tile.kv_head * a.num_sharing + r % a.num_sharing;
    P::load_query(
        reinterpret_cast<const T*>(a.q) + token * a.q_strides[0] + head * a.q_strides[1],
        a.head_dim, s.q + r * padded);
  }
  score_chunk<P>(a, s, range, num_rows);
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  for (int64_t r = 0; r < num_rows; ++r) {
    const Range row = seen(a, tile.token_begin + r / a.num_sharing);
    float* end = partials + r * row_stride + padded;
    weigh<P::kStoresPairs>(a, s.scores + r * kChunk, s.weight_pairs + r * kChunk, blocks,
          {row.low - start, row.high - start}, end, end + 1);
  }
  if (next_tile != nullptr) {  // its first keys arrive while values are added here
    const int64_t next_start = next_chunk * kChunk;
    const Range next = seen_by_any(a, *next_tile, next_start);
    const int64_t end = smaller(next.high, (next.low / kKeyStride + 1) * kKeyStride);
    RowWalk next_keys(a, *next_tile, a.k_strides, next_start + next.low);
    for (int64_t j = next.low; j < end; ++j, next_keys.next())
      prefetch_row<T>(a.k_pages, next_keys.offset(), a.head_dim);
  }
  add_values<P>(a, s, range, num_rows, partials, row_stride);
}

#if defined(__AMX_TILE__)
// bfloat16 with head sizes that are multiples of 32, by tile instructions. Scores are keys times
// queries, so that keys are read as they lie; weights are rounded to bfloat16 before they meet
// values, of which two positions lie side by side.
constexpr int64_t kTile = 16;  // rows, and 4-byte units of a row
constexpr int64_t kStep = 2 * kTile;  // positions, or values of a head, that one product adds up
constexpr int64_t kFewRows = 4;

struct TileScratch {
  uint32_t* q;  // [rows / 16][units][16]
  float* scores;  // [rows][kChunk], then weights
  uint32_t* values;  // [kChunk / 32][head_dim / 32][2][16][16]: of 32 values, fours in turn
  float* sums;  // four tiles
  uint16_t* weights;  // [rows][kChunk]
  uint16_t* keys;  // [16][head_dim]
  uint16_t* nothing;  // a row of zeros

  static int64_t padded(int64_t num_rows) { return (num_rows + kTile - 1) / kTile * kTile; }
  TileScratch(float* memory, int64_t num_rows, int64_t head_dim) {
    const int64_t rows = padded(num_rows);
    q = reinterpret_cast<uint32_t*>(memory);
    scores = memory + rows * head_dim / 2;
    values = reinterpret_cast<uint32_t*>(scores + rows * kChunk);
    sums = reinterpret_cast<float*>(values + kChunk * head_dim / 2);
    weights = reinterpret_cast<uint16_t*>(sums + 4 * kTile * kTile);
    keys = weights + rows * kChunk;
    nothing = keys + kTile * head_dim;
  }
  static int64_t size(int64_t num_rows, int64_t head_dim) {
    const int64_t rows = padded(num_rows);
    return rows * head_dim / 2 + rows * kChunk + kChunk * head_dim / 2 + 4 * kTile * kTile +
           rows * kChunk / 2 + (kTile + 1) * head_dim / 2;
  }
};

// Tiles 0-3: results of rows; 4: their weights; 5: keys or values; 6: queries; 7: scores.
struct alignas(64) AttentionTiles {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit AttentionTiles(int64_t num_rows) {
    for (int i = 0; i < 8; ++i) {
      rows[i] = static_cast<uint8_t>(i < 5 ? num_rows : kTile);
      row_bytes[i] = static_cast<uint16_t>(i < 6 ? 64 : num_rows * 4);
    }
  }
};

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
  store(scores + kChunk, mul(_mm512_shuffle_f32x4(ab01, cd01, 0xee), scale));
  store(scores + 2 * kChunk, mul(_mm512_shuffle_f32x4(ab23, cd23, 0x44), scale));
  store(scores + 3 * kChunk, mul(_mm512_shuffle_f32x4(ab23, cd23, 0xee), scale));
}

DSPARK_INLINE void spread_all(const float* sums, Floats scale, float* scores) {
  Floats values[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) values[i] = load(sums + i * kTile);
  transpose(values);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) store(scores + i * kChunk, mul(values[i], scale));
}

// Scores of 16 keys, `stride` bytes from one to the next, for all rows.
void score_keys(const Attention& a, const TileScratch& s, const char* keys, int64_t stride,
                int64_t num_rows, float* scores) {
  const Floats scale = splat(a.scale);
  const bool has_few = num_rows <= kFewRows;
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const char* const q = reinterpret_cast<const char*>(s.q + row * a.head_dim / 2);
    _tile_zero(7);
    for (int64_t e = 0; e < a.head_dim; e += kStep) {
      _tile_loadd(5, keys + e * 2, stride);
      _tile_loadd(6, q + e * 32, 64);
      _tile_dpbf16ps(7, 5, 6);
    }
    if (has_few) {
      _tile_stored(7, s.sums, 16);
      spread_few(s.sums, scale, scores);
    } else {
      _tile_stored(7, s.sums, 64);
      spread_all(s.sums, scale, scores + row * kChunk);
    }
  }
}

// Asks for the rows of the next piece of work while this one is computed, a few at a time.
class ReadAhead {
 public:
  ReadAhead(const Attention& a, const AttentionTile& tile, int64_t start, Range range)
      : a_(a), keys_(a, tile, a.k_strides, start + range.low),
        values_(a, tile, a.v_strides, start + range.low), left_(range.high - range.low) {}

  void rows(int64_t count) {
    for (; count > 0 && left_ > 0; --count, --left_, keys_.next(), values_.next()) {
      ask(a_.k_pages + keys_.offset() * 2);
      ask(a_.v_pages + values_.offset() * 2);
    }
  }

 private:
  void ask(const char* row) const {
    for (int64_t byte = 0; byte < a_.head_dim * 2; byte += 64)
      _mm_prefetch(row + byte, _MM_HINT_T1);
  }

  const Attention& a_;
  RowWalk keys_, values_;
  int64_t left_;
};

void score_tiles(const Attention& a, const AttentionTile& tile, const TileScratch& s,
                 int64_t start, Range range, int64_t num_rows, ReadAhead& ahead) {
  const bool has_whole_blocks = a.page_size % kTile == 0;
  const int64_t first = range.low / kTile * kTile;
  RowWalk at(a, tile, a.k_strides, start + (has_whole_blocks ? first : range.low));
  for (int64_t block = first; block < range.high; block += kTile) {
    if (has_whole_blocks) {
      score_keys(a, s, a.k_pages + at.offset() * 2, a.k_strides[2] * 2, num_rows,
                 s.scores + block);
      at.next(kTile);
    } else {
      const size_t row_bytes = static_cast<size_t>(a.head_dim) * 2;
      for (int64_t i = 0; i < kTile; ++i) {
        const bool is_seen = block + i >= range.low && block + i < range.high;
        memcpy(s.keys + i * a.head_dim,
               is_seen ? a.k_pages + at.offset() * 2 : reinterpret_cast<char*>(s.nothing),
               row_bytes);
        if (is_seen) at.next();
      }
      score_keys(a, s, reinterpret_cast<char*>(s.keys), a.head_dim * 2, num_rows,
                 s.scores + block);
    }
    ahead.rows(kTile);
  }
}

// Values of positions two by two, zeros for those that nobody sees.
void load_values(const Attention& a, const AttentionTile& tile, const TileScratch& s,
                 int64_t start, Range range) {
  const uint16_t* pages = reinterpret_cast<const uint16_t*>(a.v_pages);
  RowWalk at(a, tile, a.v_strides, start + range.low);
  const auto row = [&](int64_t j) {
    if (j < range.low || j >= range.high) return static_cast<const uint16_t*>(s.nothing);
    const uint16_t* values = pages + at.offset();
    at.next();
    return values;
  };
  for (int64_t j = range.low / kStep * kStep; j < range.high; j += 2) {
    const uint16_t* const even = row(j);
    const uint16_t* const odd = row(j + 1);
    uint32_t* to = s.values + j / kStep * kTile * a.head_dim + j % kStep / 2 * kTile;
    for (int64_t e = 0; e < a.head_dim; e += kStep, to += 2 * kTile * kTile) {
      const Words x = load_words(even + e), y = load_words(odd + e);
      store_words(to, _mm512_unpacklo_epi16(x, y));
      store_words(to + kTile * kTile, _mm512_unpackhi_epi16(x, y));
    }
  }
  for (int64_t j = (range.high + 1) / 2 * 2; j % kStep != 0; j += 2) {
    uint32_t* to = s.values + j / kStep * kTile * a.head_dim + j % kStep / 2 * kTile;
    for (int64_t e = 0; e < a.head_dim; e += kTile, to += kTile * kTile)
      store_words(to, zero_words());
  }
}

// Sums of weight times value for up to 16 rows and kCols times 16 values from e on.
template <int kCols>
void add_tiles(const Attention& a, const TileScratch& s, Range range, int64_t row, int64_t count,
               int64_t e, float* out, int64_t out_stride) {
  constexpr int64_t kSize = kTile * kTile;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kCols == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = range.low / kStep; step * kStep < range.high; ++step) {
    const uint32_t* v = s.values + step * kTile * a.head_dim + e * kTile;
    _tile_loadd(4, s.weights + row * kChunk + step * kStep, kChunk * 2);
    _tile_loadd(5, v, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, v + kSize, 64);
    _tile_dpbf16ps(1, 4, 5);
    if constexpr (kCols == 4) {
      _tile_loadd(5, v + 2 * kSize, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, v + 3 * kSize, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, s.sums, 64);
  _tile_stored(1, s.sums + kSize, 64);
  if constexpr (kCols == 4) {
    _tile_stored(2, s.sums + 2 * kSize, 64);
    _tile_stored(3, s.sums + 3 * kSize, 64);
  }
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < kCols; c += 2) {
      const Floats low = load(s.sums + c * kSize + r * kTile);
      const Floats high = load(s.sums + (c + 1) * kSize + r * kTile);
      float* const at = out + r * out_stride + e + c * kTile;
      store(at, _mm512_permutex2var_ps(low, first, high));
      store(at + kTile, _mm512_permutex2var_ps(low, second, high));
    }
}

void chunk_of_tiles(const Attention& a, const AttentionTile& tile, int64_t chunk, float* memory,
                    float* partials, int64_t row_stride, const AttentionTile* next_tile,
                    int64_t next_chunk) {
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = chunk * kChunk;
  const Range range = seen_by_any(a, tile, start);
  if (range.low >= range.high) return sees_nothing(a, num_rows, partials, row_stride);
  const TileScratch s(memory, num_rows, a.head_dim);
  memset(s.nothing, 0, static_cast<size_t>(a.head_dim) * 2);
  const int64_t next_start = next_chunk * kChunk;
  ReadAhead ahead(a, next_tile == nullptr ? tile : *next_tile, next_start,
                  next_tile == nullptr ? Range{0, 0} : seen_by_any(a, *next_tile, next_start));
  for (int64_t row = 0; row < num_rows; row += kTile)
    load_queries(a, tile, row, smaller(kTile, num_rows - row), s.nothing,
                 s.q + row * a.head_dim / 2);
  const AttentionTiles config(num_rows <= kFewRows ? kFewRows : kTile);
  _tile_loadconfig(&config);
  score_tiles(a, tile, s, start, range, num_rows, ahead);
  const Range blocks = {range.low / kStep * 2, (range.high + kStep - 1) / kStep * 2};
  for (int64_t r = 0; r < num_rows; ++r) {
    const Range row = seen(a, tile.token_begin + r / a.num_sharing);
    float* end = partials + r * row_stride + padded_head_dim(a.head_dim);
    weigh<true>(a, s.scores + r * kChunk, s.weights + r * kChunk, blocks,
                {row.low - start, row.high - start}, end, end + 1);
  }
  load_values(a, tile, s, start, range);
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const int64_t count = smaller(kTile, num_rows - row);
    float* const out = partials + row * row_stride;
    int64_t e = 0;
    for (; e + 2 * kStep <= a.head_dim; e += 2 * kStep)
      add_tiles<4>(a, s, range, row, count, e, out, row_stride);
    if (e < a.head_dim) add_tiles<2>(a, s, range, row, count, e, out, row_stride);
  }
  _tile_release();
}
#endif

}  // namespace

int64_t attention_scratch(const Attention& a, int64_t num_rows) {
  int64_t size = Scratch::size(num_rows, padded_head_dim(a.head_dim));
#if defined(__AMX_TILE__)
  size = larger(size, TileScratch::size(num_rows, a.head_dim));
#endif
  return (size + kLanes - 1) / kLanes * kLanes;
}

void attention_chunk(const Attention& a, const AttentionTile& tile, int64_t chunk, float* scratch,
                     float* partials, int64_t row_stride, const AttentionTile* next_tile,
                     int64_t next_chunk) {
#if DSPARK_USES_PAIRS
  if (a.type == Type::kBFloat16 && a.head_dim % (2 * kLanes) == 0)
    return chunk_of<Pairs>(a, tile, chunk, scratch, partials, row_stride, next_tile, next_chunk);
#endif
#if defined(__AMX_TILE__)
  if (a.type == Type::kBFloat16 && a.head_dim % kStep == 0)
    return chunk_of_tiles(a, tile, chunk, scratch, partials, row_stride, next_tile, next_chunk);
#endif
  if (a.type == Type::kBFloat16)
    chunk_of<Singles<uint16_t>>(a, tile, chunk, scratch, partials, row_stride, next_tile,
                                next_chunk);
  else
    chunk_of<Singles<float>>(a, tile, chunk, scratch, partials, row_stride, next_tile, next_chunk);
}

// state <- state + partial, both (values, maximum, sum) of one row.
void attention_merge(const Attention& a, float* state, const float* partial) {
  const int64_t padded = padded_head_dim(a.head_dim);
  float* end = state + padded;
  const float m = end[0] < partial[padded] ? partial[padded] : end[0];
  float factors[kLanes] = {end[0] - m, partial[padded] - m};
  store(factors, exp(load(factors)));
  const Floats old_factor = splat(factors[0]);
  const Floats new_factor = splat(factors[1]);
  for (int64_t e = 0; e < padded; e += kLanes)
    store(state + e, fma(load(partial + e), new_factor, mul(load(state + e), old_factor)));
  end[0] = m;
  end[1] = partial[padded + 1] * factors[1] + end[1] * factors[0];
}

void attention_finish(const Attention& a, const float* state, int64_t token, int64_t head) {
  const int64_t padded = padded_head_dim(a.head_dim);
  float m = state[padded];
  float sum = state[padded + 1];
  float factor = sum > 0.0f ? 1.0f : 0.0f;
  if (a.sinks != nullptr && sum > 0.0f) {
    const float sink = a.sinks[head];
    const float larger_one = m < sink ? sink : m;
    float factors[kLanes] = {m - larger_one, sink - larger_one};
    store(factors, exp(load(factors)));
    factor = factors[0];
    sum = sum * factor + factors[1];
  }
  const Floats inverse = splat(sum > 0.0f ? factor / sum : sum == sum ? 0.0f : sum);
  const int64_t at = token * a.out_strides[0] + head * a.out_strides[1];
  for (int64_t e = 0; e < a.head_dim; e += kLanes) {
    const int64_t count = smaller(kLanes, a.head_dim - e);
    const Floats y = mul(load(state + e), inverse);
    if (a.type == Type::kBFloat16) {
      uint16_t* to = reinterpret_cast<uint16_t*>(a.out) + at + e;
      if (count == kLanes) store(to, y);
      else store_some(to, y, count);
    } else {
      float* to = reinterpret_cast<float*>(a.out) + at + e;
      if (count == kLanes) store(to, y);
      else store_some(to, y, count);
    }
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark
