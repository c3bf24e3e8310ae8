// A chunk of positions whose keys and values are int8, see `byte_block_size` in kernels.h. Queries
// are made int8 too, weights whole numbers of 16 bits: all products are added up exactly, so no
// order matters and every instruction set gives the same sums.
#pragma once

#include "attention_rows.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kByteRows = 6, kByteBlocks = 4;  // 24 sums, 4 operands, 1 broadcast of 32 registers
constexpr int kWeightRows = 3, kWeightGroups = 4;  // the same: each sum has two parts
#else
constexpr int kByteRows = 3, kByteBlocks = 1;
constexpr int kWeightRows = 1, kWeightGroups = 1;
#endif
constexpr int64_t kByteLine = 64;
constexpr int64_t kChunkBlocks = kChunk / kBytePositions;
constexpr float kMostWeight = 65535.0f;  // of a row's chunk; 255 * 127 * kChunk is exact as float32
constexpr float kLeastScale = 1e-30f;  // smaller products of weight and scale count as none

// sum += four unsigned bytes times four signed ones, in each lane.
DSPARK_INLINE Words add_dot(Words sum, Words u, Words s) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic, see DotInt8.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
  return sum;
#else
  // In 16 bits, because the 8-bit instruction of AVX2 saturates.
  const auto half = [](__m256i total, __m256i x, __m256i y) __attribute__((always_inline)) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
  };
  return {half(sum.a, u.a, s.a), half(sum.b, u.b, s.b)};
#endif
}

DSPARK_INLINE Words splat_bytes(const void* four) {
  int32_t bits;
  memcpy(&bits, four, sizeof bits);
  return splat_word(bits);
}

// Where the thread's scratch memory holds what.
struct ByteScratch {
  float* scores;  // [rows][kChunk], then weights times the scales of values
  float* scales;  // [rows], of q, then of the weights
  int32_t* starts;  // [rows], of the sums of scores: what shifted keys add too much
  int8_t* q;  // [rows][padded]
  uint8_t* high;  // [rows][kChunk], of the weights
  uint8_t* low;

  ByteScratch(float* memory, int64_t num_rows, int64_t padded) {
    scores = memory;
    scales = scores + num_rows * kChunk;
    starts = reinterpret_cast<int32_t*>(scales + num_rows);
    q = reinterpret_cast<int8_t*>(starts + num_rows);
    high = reinterpret_cast<uint8_t*>(q + num_rows * padded);
    low = high + num_rows * kChunk;
  }
  static int64_t size(int64_t num_rows, int64_t padded) {
    return num_rows * (kChunk + 2 + padded / 4 + kChunk / 2);
  }
};

// Blocks of a chunk's positions, in order.
struct ByteBlocks {
  const char* keys[kChunkBlocks];
  const char* values[kChunkBlocks];

  ByteBlocks(const Attention& a, const AttentionTile& tile, int64_t start, Range blocks) {
    const int64_t in_page = a.page_size / kBytePositions;
    const int64_t first = start / kBytePositions + blocks.low;
    const int32_t* page = tile.block_table + first / in_page;
    int64_t block = first % in_page;
    for (int64_t b = blocks.low; b < blocks.high; ++b) {
      const auto at = [&](const char* pages, const int64_t strides[3]) {
        return pages + *page * strides[0] + tile.kv_head * strides[1] + block * strides[2];
      };
      keys[b] = at(a.k_pages, a.k_strides);
      values[b] = at(a.v_pages, a.v_strides);
      if (++block == in_page) block = 0, ++page;
    }
  }
};

const float* byte_scales(const char* block, int64_t padded) {
  return reinterpret_cast<const float*>(block + padded / 4 * kByteLine);
}

void load_byte_query(const Attention& a, const AttentionTile& tile, int64_t row,
                     const ByteScratch& s, int64_t padded) {
  const int64_t token = tile.token_begin + row / a.num_sharing;
  const int64_t head = tile.kv_head * a.num_sharing + row % a.num_sharing;
  const int64_t value_bytes = a.type == Type::kBFloat16 ? 2 : 4;
  int8_t* const q = s.q + row * padded;
  quantize_row(a.type, a.q + (token * a.q_strides[0] + head * a.q_strides[1]) * value_bytes,
               a.head_dim, reinterpret_cast<uint8_t*>(q), padded, s.scales + row);
  int32_t sum = 0;
  for (int64_t e = 0; e < padded; ++e) {
    q[e] = static_cast<int8_t>(static_cast<uint8_t>(q[e]) ^ 128);
    sum += q[e];
  }
  s.starts[row] = -128 * sum;
}

// Scores of kNumRows rows over kNumBlocks blocks.
template <int kNumRows, int kNumBlocks>
void score_bytes(const Attention& a, const ByteScratch& s, int64_t padded, const char* const* keys,
                 int64_t row, int64_t block) {
  const int8_t* const q = s.q + row * padded;
  const char* k[kNumBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kNumBlocks; ++b) k[b] = keys[block + b];
  Words sums[kNumRows][kNumBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kNumBlocks; ++b) sums[r][b] = splat_word(s.starts[row + r]);
#pragma GCC unroll 1
  for (int64_t unit = 0; unit < padded / 4; ++unit) {
    Words x[kNumBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kNumBlocks; ++b) x[b] = load_words(k[b] + unit * kByteLine);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      const Words y = splat_bytes(q + r * padded + unit * 4);
#pragma GCC unroll 4
      for (int b = 0; b < kNumBlocks; ++b) sums[r][b] = add_dot(sums[r][b], x[b], y);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < kNumBlocks; ++b) {
    const Floats scales = load(byte_scales(k[b], padded));
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r)
      store(s.scores + (row + r) * kChunk + (block + b) * kLanes,
            mul(mul(to_floats(sums[r][b]), scales), splat(s.scales[row + r] * a.scale)));
  }
}

template <int kNumBlocks>
void score_byte_rows(const Attention& a, const ByteScratch& s, int64_t padded,
                     const char* const* keys, int64_t num_rows, int64_t block) {
  for (int64_t row = 0; row < num_rows; row += kByteRows) switch (smaller(kByteRows, num_rows - row)) {
#define DSPARK_CASE(n)                                             \
  case n:                                                          \
    score_bytes<n, kNumBlocks>(a, s, padded, keys, row, block);    \
    break;
      DSPARK_CASE(1)
      DSPARK_CASE(2)
#if defined(__AVX512F__)
      DSPARK_CASE(3)
      DSPARK_CASE(4)
      DSPARK_CASE(5)
#endif
#undef DSPARK_CASE
      default:
        score_bytes<kByteRows, kNumBlocks>(a, s, padded, keys, row, block);
    }
}

// Scores of a row to weights: times the scales of the values, as whole numbers of the largest.
void weigh_bytes(const Attention& a, const ByteScratch& s, int64_t padded,
                 const char* const* values, Range blocks, Range seen_by_row, int64_t row,
                 float* maximum, float* sum) {
  float* const scores = s.scores + row * kChunk;
  Floats largest = zero(), broken = zero();
  const auto keep = [&](int64_t at, Floats weights) __attribute__((always_inline)) {
    const Floats scales = load(byte_scales(values[at / kLanes], padded));
    // The scale of a position that nobody has written may be anything.
    const Floats scaled = if_ge(zero(), weights, zero(), mul(weights, scales));
    store(scores + at, scaled);
    largest = max(largest, scaled);
    broken = fma(scaled, zero(), broken);  // NaN if one is not finite
  };
  weigh(a, scores, blocks, seen_by_row, maximum, sum, keep);
  *sum += sum_lanes(broken);
  const float most = max_lanes(largest);
  s.scales[row] = most / kMostWeight;
  const Floats factor = splat(most > kLeastScale ? kMostWeight / most : 0.0f);
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    const Words whole = to_words(mul(load(scores + b * kLanes), factor));
    store_bytes(s.low + row * kChunk + b * kLanes, whole);
    store_bytes(s.high + row * kChunk + b * kLanes, high_bytes(whole));
  }
}

// Sums of weight times value for kNumRows rows and kGroups times 16 values from e on.
template <int kNumRows, int kGroups>
void add_byte_values(const ByteScratch& s, int64_t padded, const char* const* values, Range blocks,
                     int64_t row, int64_t e, float* out, int64_t out_stride) {
  Words high[kNumRows][kGroups], low[kNumRows][kGroups];
#pragma GCC unroll 4
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) high[r][g] = low[r][g] = zero_words();
  const uint8_t* const highs = s.high + row * kChunk;
  const uint8_t* const lows = s.low + row * kChunk;
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    const char* v = values[b] + e * 4;
#pragma GCC unroll 1
    for (int64_t j = b * kLanes; j < (b + 1) * kLanes; j += 4, v += padded * 4) {
      Words x[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) x[g] = load_words(v + g * kByteLine);
#pragma GCC unroll 4
      for (int r = 0; r < kNumRows; ++r) {
        const Words h = splat_bytes(highs + r * kChunk + j);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) high[r][g] = add_dot(high[r][g], h, x[g]);
        const Words l = splat_bytes(lows + r * kChunk + j);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) low[r][g] = add_dot(low[r][g], l, x[g]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g)
      store(out + r * out_stride + e + g * kLanes,
            mul(fma(to_floats(high[r][g]), splat(256.0f), to_floats(low[r][g])),
                splat(s.scales[row + r])));
}

template <int kNumRows>
void add_byte_rows(const ByteScratch& s, int64_t padded, const char* const* values, Range blocks,
                   int64_t row, float* out, int64_t out_stride) {
  int64_t e = 0;
  for (; e + kWeightGroups * kLanes <= padded; e += kWeightGroups * kLanes)
    add_byte_values<kNumRows, kWeightGroups>(s, padded, values, blocks, row, e, out, out_stride);
  for (; e < padded; e += kLanes)
    add_byte_values<kNumRows, 1>(s, padded, values, blocks, row, e, out, out_stride);
}

void chunk_of_bytes(const Attention& a, const AttentionPiece& piece, float* memory,
                    float* partials, int64_t row_stride, ReadAhead& ahead) {
  const AttentionTile& tile = *piece.tile;
  const int64_t padded = padded_head_dim(a.head_dim);
  const int64_t num_rows = (tile.token_end - tile.token_begin) * a.num_sharing;
  const int64_t start = piece.chunk * kChunk;
  const Range range = seen_by_any(a, tile, start);
  if (range.low >= range.high) return sees_nothing(a, num_rows, partials, row_stride);
  const ByteScratch s(memory, num_rows, padded);
  const Range blocks = {range.low / kLanes, (range.high + kLanes - 1) / kLanes};
  const ByteBlocks at(a, tile, start, blocks);
  const int64_t block_lines = padded / 4 + 1;
  const auto ask_for = [&](int64_t num_blocks) {
    ahead.lines_allowed += num_blocks * block_lines;
    ask(ahead, num_blocks * block_lines * 3 / 2);  // until it is far enough ahead
  };
  for (int64_t row = 0; row < num_rows; ++row) load_byte_query(a, tile, row, s, padded);
  int64_t b = blocks.low;
  for (; b + kByteBlocks <= blocks.high; b += kByteBlocks) {
    ask_for(kByteBlocks);
    score_byte_rows<kByteBlocks>(a, s, padded, at.keys, num_rows, b);
  }
  for (; b < blocks.high; ++b) {
    ask_for(1);
    score_byte_rows<1>(a, s, padded, at.keys, num_rows, b);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const Range own = seen(a, tile.token_begin + row / a.num_sharing);
    float* const end = partials + row * row_stride + padded;
    weigh_bytes(a, s, padded, at.values, blocks, {own.low - start, own.high - start}, row, end,
                end + 1);
    if (row == 0) ask_for(blocks.high - blocks.low);
  }
  for (int64_t row = 0; row < num_rows; row += kWeightRows) {
    float* const out = partials + row * row_stride;
    switch (smaller(kWeightRows, num_rows - row)) {
      case 1:
        add_byte_rows<1>(s, padded, at.values, blocks, row, out, row_stride);
        break;
#if defined(__AVX512F__)
      case 2:
        add_byte_rows<2>(s, padded, at.values, blocks, row, out, row_stride);
        break;
#endif
      default:
        add_byte_rows<kWeightRows>(s, padded, at.values, blocks, row, out, row_stride);
    }
  }
}

}  // namespace

// One row of keys or values into its block; `lane`: its position there.
void place_bytes(const Attention& a, bool is_key, const char* row, char* block, int64_t lane) {
  const int64_t padded = padded_head_dim(a.head_dim);
  constexpr int64_t kPart = 256;  // values at a time; heads are seldom larger
  uint8_t few[kPart];
  uint8_t* const bytes = padded <= kPart ? few : new uint8_t[static_cast<size_t>(padded)];
  float scale;
  quantize_row(a.type, row, a.head_dim, bytes, padded, &scale);
  for (int64_t e = 0; e < padded && is_key; e += 4)
    memcpy(block + e / 4 * kByteLine + lane * 4, bytes + e, 4);
  for (int64_t e = 0; e < padded && !is_key; ++e)
    block[lane / 4 * padded * 4 + e * 4 + lane % 4] = static_cast<char>(bytes[e] ^ 128);
  memcpy(block + padded / 4 * kByteLine + lane * 4, &scale, sizeof scale);
  if (bytes != few) delete[] bytes;
}

}  // namespace DSPARK_ISA
}  // namespace dspark
