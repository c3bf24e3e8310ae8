// One chunk of positions for the rows (tokens x sharing heads) of one key/value head.
// A row's result over a chunk depends on the row and the positions that it sees: scores add over
// the head dimension in order, weights add by (position mod 16), values add by position, and a
// position that only another row sees adds an exact zero.
#include "kernels.h"
#include "vector.h"

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

// Where the thread's scratch memory holds what.
struct Scratch {
  float* q;  // [rows][padded head_dim]
  float* keys;  // [head_dim][kBlocks * 16] of a few blocks, transposed
  float* scores;  // [rows][kChunk]
  int64_t* k_offsets;  // [kChunk], elements from the pages' start
  int64_t* v_offsets;

  Scratch(float* memory, int64_t num_rows, int64_t padded) {
    q = memory;
    keys = q + num_rows * padded;
    scores = keys + padded * kBlocks * kLanes;
    k_offsets = reinterpret_cast<int64_t*>(scores + num_rows * kChunk);
    v_offsets = k_offsets + kChunk;
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

constexpr int64_t kKeyStride = kBlocks * kLanes;  // from one e to the next in Scratch::keys

// Rows e to e + count of 16 keys; a null row is zeros.
template <class T>
DSPARK_INLINE void transpose_part(const T* const rows[kLanes], int64_t e, int64_t count,
                                  float* out) {
  Floats values[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    values[i] = rows[i] == nullptr ? zero()
                : count == kLanes  ? load(rows[i] + e)
                                   : load_some(rows[i] + e, count);
  transpose(values);
  for (int64_t i = 0; i < count; ++i) store(out + (e + i) * kKeyStride, values[i]);
}

#if defined(__AVX512F__)
// 32 values of 2 bytes are 16 of 4 bytes: one transposition serves twice as many.
DSPARK_INLINE void transpose_pairs(const uint16_t* const rows[kLanes], int64_t e, float* out) {
  Floats values[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    values[i] = rows[i] == nullptr ? zero() : _mm512_castsi512_ps(load_words(rows[i] + e));
  transpose(values);
  const Words high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const Words pair = _mm512_castps_si512(values[i]);
    float* at = out + (e + 2 * i) * kKeyStride;
    store(at, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
    store(at + kKeyStride, _mm512_castsi512_ps(_mm512_and_si512(pair, high)));
  }
}
#endif

// Keys of 16 positions to out[e][lane]; positions outside of the range give zeros.
template <class T>
void transpose_keys(const Attention& a, const Scratch& s, int64_t block, Range range,
                    float* out) {
  const T* rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int64_t j = block * kLanes + i;
    const bool is_inside = j >= range.low && j < range.high;
    rows[i] = is_inside ? reinterpret_cast<const T*>(a.k_pages) + s.k_offsets[j] : nullptr;
  }
  int64_t e = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2)
    for (; e + 2 * kLanes <= a.head_dim; e += 2 * kLanes) transpose_pairs(rows, e, out);
#endif
  for (; e < a.head_dim; e += kLanes)
    transpose_part(rows, e, smaller(kLanes, a.head_dim - e), out);
}

// Asks for rows of the pages that will be read soon.
template <class T>
void prefetch_rows(const char* pages, const int64_t* offsets, int64_t begin, int64_t end,
                   int64_t head_dim) {
  for (int64_t j = begin; j < end; ++j) {
    const char* row = pages + offsets[j] * static_cast<int64_t>(sizeof(T));
    for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += 64)
      _mm_prefetch(row + byte, _MM_HINT_T0);
  }
}

template <int kNumRows>
void score_tile(const Attention& a, const float* q, int64_t padded, const float* keys,
                float* scores) {
  Floats sums[kNumRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = zero();
  for (int64_t e = 0; e < a.head_dim; ++e) {
    Floats k[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) k[b] = load(keys + (e * kBlocks + b) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      const Floats x = splat(q[r * padded + e]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sums[r][b] = fma(x, k[b], sums[r][b]);
    }
  }
  const Floats scale = splat(a.scale);
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      store(scores + r * kChunk + b * kLanes, mul(sums[r][b], scale));
}

void score_rows(const Attention& a, const float* q, int64_t padded, const float* keys,
                float* scores, int64_t num_rows) {
  switch (num_rows) {
    case 1:
      return score_tile<1>(a, q, padded, keys, scores);
    case 2:
      return score_tile<2>(a, q, padded, keys, scores);
    case 3:
      return score_tile<3>(a, q, padded, keys, scores);
    case 4:
      return score_tile<4>(a, q, padded, keys, scores);
    case 5:
      return score_tile<5>(a, q, padded, keys, scores);
    default:
      return score_tile<kRows>(a, q, padded, keys, scores);
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
void weigh(const Attention& a, float* scores, Range blocks, Range row, float* maximum,
           float* sum) {
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
    total = add(total, p);
  }
  *maximum = m;
  *sum = sum_lanes(total);
}

template <class T, int kNumRows, int kWidth>
void value_tile(const Attention& a, const Scratch& s, const float* weights, Range range,
                int64_t e, float* out, int64_t out_stride) {
  const T* pages = reinterpret_cast<const T*>(a.v_pages) + e;
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

template <class T, int kNumRows>
void value_rows(const Attention& a, const Scratch& s, const float* weights, Range range,
                float* out, int64_t out_stride) {
  int64_t e = 0;
  for (; e + kBlocks * kLanes <= a.head_dim; e += kBlocks * kLanes)
    value_tile<T, kNumRows, kBlocks>(a, s, weights, range, e, out, out_stride);
  for (; e < a.head_dim; e += kLanes)
    value_tile<T, kNumRows, 1>(a, s, weights, range, e, out, out_stride);
}

template <class T>
void add_values(const Attention& a, const Scratch& s, Range range, int64_t num_rows,
                float* out, int64_t out_stride) {
  for (int64_t r = 0; r < num_rows; r += kRows) {
    const float* weights = s.scores + r * kChunk;
    float* first = out + r * out_stride;
    switch (smaller(kRows, num_rows - r)) {
      case 1:
        value_rows<T, 1>(a, s, weights, range, first, out_stride);
        break;
      case 2:
        value_rows<T, 2>(a, s, weights, range, first, out_stride);
        break;
      case 3:
        value_rows<T, 3>(a, s, weights, range, first, out_stride);
        break;
      case 4:
        value_rows<T, 4>(a, s, weights, range, first, out_stride);
        break;
      case 5:
        value_rows<T, 5>(a, s, weights, range, first, out_stride);
        break;
      default:
        value_rows<T, kRows>(a, s, weights, range, first, out_stride);
    }
  }
}

template <class T>
void chunk_of(const Attention& a, const AttentionTile& tile, int64_t chunk, float* memory,
              float* partials, int64_t row_stride) {
  const int64_t padded = padded_head_dim(a.head_dim);
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = chunk * kChunk;
  const Scratch s(memory, num_rows, padded);

  Range range = {kChunk, 0};  // positions of the chunk that any row sees
  for (int64_t token = tile.token_begin; token < tile.token_end; ++token) {
    const Range r = seen(a, token);
    range.low = smaller(range.low, larger(r.low - start, 0));
    range.high = larger(range.high, smaller(r.high - start, kChunk));
  }
  for (int64_t j = range.low; j < range.high; ++j) {
    const int64_t page = tile.block_table[(start + j) / a.page_size];
    const int64_t row = (start + j) % a.page_size;
    s.k_offsets[j] = page * a.k_strides[0] + tile.kv_head * a.k_strides[1] + row * a.k_strides[2];
    s.v_offsets[j] = page * a.v_strides[0] + tile.kv_head * a.v_strides[1] + row * a.v_strides[2];
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t token = tile.token_begin + r / a.num_sharing;
    const int64_t head = tile.kv_head * a.num_sharing + r % a.num_sharing;
    const T* q = reinterpret_cast<const T*>(a.q) + token * a.q_strides[0] + head * a.q_strides[1];
    for (int64_t e = 0; e < a.head_dim; e += kLanes) {
      const int64_t count = a.head_dim - e;
      store(s.q + r * padded + e, count >= kLanes ? load(q + e) : load_some(q + e, count));
    }
  }

  if (range.low >= range.high) {
    for (int64_t r = 0; r < num_rows; ++r) {
      memset(partials + r * row_stride, 0, static_cast<size_t>(padded) * sizeof(float));
      partials[r * row_stride + padded] = kLowest;
      partials[r * row_stride + padded + 1] = 0.0f;
    }
    return;
  }
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  for (int64_t b = blocks.low / kBlocks * kBlocks; b < blocks.high; b += kBlocks) {
    const int64_t here = larger(b * kLanes, range.low);
    const int64_t next = smaller((b + kBlocks) * kLanes, range.high);
    const int64_t after = smaller((b + 2 * kBlocks) * kLanes, range.high);
    prefetch_rows<T>(a.k_pages, s.k_offsets, next, after, a.head_dim);
    prefetch_rows<T>(a.v_pages, s.v_offsets, here, next, a.head_dim);
    for (int64_t i = 0; i < kBlocks; ++i)
      if (b + i >= blocks.low && b + i < blocks.high)
        transpose_keys<T>(a, s, b + i, range, s.keys + i * kLanes);
      else
        for (int64_t e = 0; e < a.head_dim; ++e) store(s.keys + (e * kBlocks + i) * kLanes, zero());
    for (int64_t r = 0; r < num_rows; r += kRows)
      score_rows(a, s.q + r * padded, padded, s.keys, s.scores + r * kChunk + b * kLanes,
                 smaller(kRows, num_rows - r));
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const Range row = seen(a, tile.token_begin + r / a.num_sharing);
    float* end = partials + r * row_stride + padded;
    weigh(a, s.scores + r * kChunk, blocks, {row.low - start, row.high - start}, end, end + 1);
  }
  add_values<T>(a, s, range, num_rows, partials, row_stride);
}

}  // namespace

int64_t attention_scratch(const Attention& a, int64_t num_rows) {
  const int64_t padded = padded_head_dim(a.head_dim);
  return num_rows * (padded + kChunk) + padded * kBlocks * kLanes + 4 * kChunk;
}

void attention_chunk(const Attention& a, const AttentionTile& tile, int64_t chunk, float* scratch,
                     float* partials, int64_t row_stride) {
  if (a.type == Type::kBFloat16)
    chunk_of<uint16_t>(a, tile, chunk, scratch, partials, row_stride);
  else
    chunk_of<float>(a, tile, chunk, scratch, partials, row_stride);
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
    if (a.type == Type::kBFloat16)
      store_some(reinterpret_cast<uint16_t*>(a.out) + at + e, y, count);
    else
      store_some(reinterpret_cast<float*>(a.out) + at + e, y, count);
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark
