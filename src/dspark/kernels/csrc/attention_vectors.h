// A chunk of positions by vector instructions: keys are transposed, sixteen positions to a vector.
#pragma once

#include "attention_rows.h"

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
  static constexpr int kParts = 1;  // values of a unit that are multiplied one after the other
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

  DSPARK_INLINE Words key(Words unit, int) { return unit; }
  DSPARK_INLINE Floats score(Floats sum, Words q, Words key) {
    return fma(as_floats(q), as_floats(key), sum);
  }
};

#if !defined(__AVX512F__)
// The same sums of bfloat16 rows, for head sizes that are multiples of 16: keys are transposed and
// stored as pairs, and widened where they are multiplied.
struct Halves : Singles<uint16_t> {
  static constexpr int kParts = 2;
  static int64_t num_units(int64_t head_dim) { return head_dim / 2; }

  static void transpose_keys(const uint16_t* const rows[kLanes], int64_t head_dim, float* out) {
    for (int64_t e = 0; e < head_dim; e += kLanes)
      for (int half = 0; half < kLanes; half += 8) {
        __m256 values[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
          values[i] = _mm256_castsi256_ps(load_half(rows[half + i] + e));
        transpose_half(values);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
          _mm256_storeu_ps(out + (e / 2 + i) * kKeyStride + half, values[i]);
      }
  }

  DSPARK_INLINE Words key(Words unit, int part) {
    return part == 0 ? low_shorts_up(unit) : high_shorts(unit);
  }
};
#endif

#if DSPARK_USES_PAIRS
// Products of bfloat16 pairs, added in float32: half the instructions, for head sizes that are
// multiples of 32. Weights are rounded to bfloat16.
struct Pairs {
  using Value = uint16_t;
  static constexpr bool kStoresPairs = true;
  static constexpr int kParts = 1;
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

  DSPARK_INLINE Words key(Words unit, int) { return unit; }
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
#pragma GCC unroll 2
    for (int part = 0; part < P::kParts; ++part)
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; ++r) {
        int32_t bits;
        memcpy(&bits, q + r * padded + unit * P::kParts + part, sizeof bits);
        const Words x = splat_word(bits);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b)
          sums[r][b] = P::score(sums[r][b], x, P::key(k[b], part));
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

// Sixteen values of a row as a product takes them, and its sums in the row's order.
DSPARK_INLINE Floats load_values(const float* p) { return load(p); }
DSPARK_INLINE Floats values_in_order(Floats sums, const float*) { return sums; }
#if defined(__AVX512F__)
DSPARK_INLINE Floats load_values(const uint16_t* p) { return load(p); }
DSPARK_INLINE Floats values_in_order(Floats sums, const uint16_t*) { return sums; }
#else
// Even values, then odd ones: two instructions and not four.
DSPARK_INLINE Floats load_values(const uint16_t* p) {
  const __m256i pairs = load_half(p);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
}
DSPARK_INLINE Floats values_in_order(Floats sums, const uint16_t*) {
  const __m256 low = _mm256_unpacklo_ps(sums.a, sums.b);
  const __m256 high = _mm256_unpackhi_ps(sums.a, sums.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
#endif
template <class T>
DSPARK_INLINE Floats load_some_values(const T* p, int64_t count) {
  T values[kLanes] = {};
  memcpy(values, p, static_cast<size_t>(count) * sizeof(T));
  return load_values(values);
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
      v[w] = kWidth == 1 && count < kLanes ? load_some_values(row, count)
                                           : load_values(row + w * kLanes);
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
    for (int w = 0; w < kWidth; ++w)
      store(out + r * out_stride + e + w * kLanes, values_in_order(sums[r][w], pages));
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

template <class P>
void score_chunk(const Attention& a, const Scratch& s, Range range, int64_t num_rows,
                 ReadAhead& ahead) {
  using T = typename P::Value;
  const int64_t padded = padded_head_dim(a.head_dim);
  // Of keys and of values.
  const int64_t lines_per_block =
      2 * kKeyStride * a.head_dim * static_cast<int64_t>(sizeof(T)) / kLineBytes;
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  for (int64_t b = blocks.low / kBlocks * kBlocks; b < blocks.high; b += kBlocks) {
    ahead.lines_allowed += lines_per_block;
    ask(ahead, lines_per_block);
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

template <class P>
void chunk_of(const Attention& a, const AttentionPiece& piece, float* memory, float* partials,
              int64_t row_stride, ReadAhead& ahead) {
  using T = typename P::Value;
  const AttentionTile& tile = *piece.tile;
  const int64_t padded = padded_head_dim(a.head_dim);
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = piece.chunk * kChunk;
  const Scratch s(memory, num_rows, padded);
  const Range range = seen_by_any(a, tile, start);
  if (range.low >= range.high) return sees_nothing(a, num_rows, partials, row_stride);
  memset(s.nothing, 0, static_cast<size_t>(padded) * sizeof(float));
  list_rows(a, tile, a.k_strides, start, range, s.k_offsets);
  list_rows(a, tile, a.v_strides, start, range, s.v_offsets);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t token = tile.token_begin + r / a.num_sharing;
    const int64_t head = tile.kv_head * a.num_sharing + r % a.num_sharing;
    P::load_query(
        reinterpret_cast<const T*>(a.q) + token * a.q_strides[0] + head * a.q_strides[1],
        a.head_dim, s.q + r * padded);
  }
  score_chunk<P>(a, s, range, num_rows, ahead);
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  for (int64_t r = 0; r < num_rows; ++r) {
    const Range row = seen(a, tile.token_begin + r / a.num_sharing);
    float* end = partials + r * row_stride + padded;
    float* const scores = s.scores + r * kChunk;
    const auto keep = [&](int64_t at, Floats weights) {
      if constexpr (P::kStoresPairs) store(s.weight_pairs + r * kChunk + at, weights);
      else store(scores + at, weights);
    };
    weigh(a, scores, blocks, {row.low - start, row.high - start}, end, end + 1, keep);
  }
  add_values<P>(a, s, range, num_rows, partials, row_stride);
}

}  // namespace
}  // namespace DSPARK_ISA
}  // namespace dspark
