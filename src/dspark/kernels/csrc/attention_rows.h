// What every way to attend shares: who sees what, where rows lie, and scores made weights.
#pragma once

#include "kernels.h"
#include "read_ahead.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

constexpr float kLowest = -1e30f;  // below any score; its weight is exactly 0

using Range = PositionRange;

DSPARK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
DSPARK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

Range seen(const Attention& a, int64_t token) {
  const int64_t low = a.window > 0 ? larger(0, a.positions[token] + 1 - a.window) : 0;
  return {low, a.visible[token]};
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

// The same of a range of positions from `start` on, page by page.
void list_rows(const Attention& a, const AttentionTile& tile, const int64_t strides[3],
               int64_t start, Range range, int64_t* offsets) {
  RowWalk at(a, tile, strides, start + range.low);
  for (int64_t j = range.low; j < range.high;) {
    const int64_t left = a.page_size - (start + j) % a.page_size;
    const int64_t count = smaller(left, range.high - j), first = at.offset();
    for (int64_t i = 0; i < count; ++i) offsets[j + i] = first + i * strides[2];
    j += count;
    at.next(count);
  }
}

void sees_nothing(const Attention& a, int64_t num_rows, float* partials, int64_t row_stride) {
  const int64_t padded = padded_head_dim(a.head_dim);
  for (int64_t r = 0; r < num_rows; ++r) {
    memset(partials + r * row_stride, 0, static_cast<size_t>(padded + 2) * sizeof(float));
    partials[r * row_stride + padded] = kLowest;
  }
}

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
// 8 x 8 values of 4 bytes.
DSPARK_INLINE void transpose_half(__m256 rows[8]) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {  // pairs of rows
    a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // fours
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: columns i, i + 4
    rows[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// 16 x 16 of them.
DSPARK_INLINE void transpose(Floats rows[kLanes]) {
  __m256 quarters[4][8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    quarters[0][i] = rows[i].a, quarters[1][i] = rows[i + 8].a;
    quarters[2][i] = rows[i].b, quarters[3][i] = rows[i + 8].b;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) transpose_half(quarters[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarters[0][i], quarters[1][i]};
    rows[i + 8] = {quarters[2][i], quarters[3][i]};
  }
}
#endif

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

// Scores of one row to weights, handed to `keep(position, weights)` by sixteens; the row
// sees positions [low, high) of the chunk.
template <class Keep>
DSPARK_INLINE void weigh(const Attention& a, float* scores, Range blocks, Range row,
                         float* maximum, float* sum, const Keep& keep) {
  const Floats low = splat(static_cast<float>(row.low));
  const Floats last = splat(static_cast<float>(row.high - 1));
  const Floats lowest = splat(kLowest);
  Floats largest = lowest;
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    Floats x = load(scores + b * kLanes);
    const bool is_cut = b * kLanes < row.low || (b + 1) * kLanes > row.high;
    if (a.softcap > 0) x = soft_cap(x, a.softcap);
    if (is_cut) {
      const Floats lane = lane_numbers(b * kLanes);
      x = if_ge(lane, low, x, lowest);
      x = if_ge(last, lane, x, lowest);
    }
    if (is_cut || a.softcap > 0) store(scores + b * kLanes, x);
    largest = max(largest, x);
  }
  const float m = max_lanes(largest);
  const Floats base = splat(m <= kLowest ? 0.0f : m);  // a row that sees nothing: all weights 0
  Floats total = zero();
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    const Floats p = exp(sub(load(scores + b * kLanes), base));
    keep(b * kLanes, p);
    total = add(total, p);
  }
  *maximum = m;
  *sum = sum_lanes(total);
}

}  // namespace
}  // namespace DSPARK_ISA
}  // namespace dspark
