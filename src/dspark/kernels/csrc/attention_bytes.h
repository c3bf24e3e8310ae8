// A chunk of positions whose keys and values are int8, see `byte_block_size` in kernels.h. Queries
// are made int8 too, weights whole numbers of 16 bits: all products are added up exactly, so no
// order matters and every instruction set gives the same sums.
#pragma once

#include "attention_rows.h"
#include "short_pairs.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kByteRows = 6, kByteBlocks = 4;  // 24 sums, 4 operands, 1 broadcast of 32 registers
constexpr int kWeightRows = 3, kWeightGroups = 4;  // the same: each sum has two parts
#elif defined(__AVX512F__)
constexpr int kByteRows = 6, kByteBlocks = 2;  // 12 sums, 4 operands, 2 broadcasts, products
constexpr int kWeightRows = 3, kWeightGroups = 4;  // the same, and 4 sums of values
#else
constexpr int kByteRows = 3, kByteBlocks = 1;
constexpr int kWeightRows = 3, kWeightGroups = 1;
#endif
constexpr int64_t kByteLine = 64;
constexpr int64_t kChunkBlocks = kChunk / kBytePositions;
constexpr float kMostWeight = 65535.0f;  // of a row's chunk; 255 * 127 * kChunk is exact as float32
constexpr float kLeastScale = 1e-30f;  // smaller products of weight and scale count as none

#if defined(__AVX512VNNI__)
// Four bytes of each lane, and four of a row for all lanes.
using Fours = Words;
using QueryValue = int8_t;

// Shifted bytes as signed values, and their sum; `q` may be where the bytes are.
DSPARK_INLINE int32_t take_query(const uint8_t* bytes, int64_t padded, int8_t* q) {
  int32_t sum = 0;
  for (int64_t e = 0; e < padded; ++e) {
    q[e] = static_cast<int8_t>(bytes[e] ^ 128);
    sum += q[e];
  }
  return sum;
}
DSPARK_INLINE Fours unsigned_fours(const char* p) { return load_words(p); }

DSPARK_INLINE Words splat_bytes(const void* four) {
  int32_t bits;
  memcpy(&bits, four, sizeof bits);
  return splat_word(bits);
}

// sum += four unsigned bytes times four signed ones, in each lane.
DSPARK_INLINE Words add_dot(Words sum, Words u, Words s) {
  // Not the intrinsic, see DotInt8.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
  return sum;
}
DSPARK_INLINE Words add_products(Words sum, Fours keys, const int8_t* four) {
  return add_dot(sum, keys, splat_bytes(four));
}

#else
// Widened to 16 bits, once for all rows, see short_pairs.h. Rows have their fours in that order.
struct Fours {
  Words even, odd;
};
using QueryValue = int16_t;

DSPARK_INLINE Fours unsigned_fours(const char* p) {
  const Words x = load_words(p);
  return {low_bytes(x), upper_bytes(x)};
}
DSPARK_INLINE Fours signed_fours(const char* p) {
  const Words x = load_words(p);
  return {signed_low_bytes(x), signed_upper_bytes(x)};
}

// Not the intrinsic: GCC loads two pairs into one register of the other kind, and takes them apart.
DSPARK_INLINE Repeated splat_pair(const int16_t* two) {
  Repeated x;
  asm("vpbroadcastd %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const char(*)[4]>(two)));
  return x;
}

DSPARK_INLINE Words add_products(Words sum, const Fours& x, const int16_t* four) {
  const Repeated even = splat_pair(four), odd = splat_pair(four + 2);
  return add_pairs(add_pairs(sum, x.even, even), x.odd, odd);
}

// Sixteen values of 16 bits, each four of them in the order of `Fours`.
DSPARK_INLINE void store_fours(int16_t* p, __m256i x) {
  const __m256i y = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xd8), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), y);
}

DSPARK_INLINE int32_t take_query(const uint8_t* bytes, int64_t padded, int16_t* q) {
  const __m256i shift = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t e = 0; e < padded; e += kLanes) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + e));
    const __m256i values = _mm256_sub_epi16(_mm256_cvtepu8_epi16(x), shift);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(values, one));
    store_fours(q + e, values);
  }
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
#endif

// Where the thread's scratch memory holds what.
struct ByteScratch {
  float* scores;  // [rows][kChunk], then weights times the scales of values
  float* scales;  // [rows], of q, then of the weights
  int32_t* starts;  // [rows], of the sums of scores: what shifted keys add too much
  QueryValue* q;  // [rows][padded]
#if defined(__AVX512VNNI__)
  uint8_t* high;  // [rows][kChunk], of the weights
  uint8_t* low;
#else
  int16_t* weights;  // [rows][kChunk], less 2^15, in the order of `Fours`
  uint8_t* row;      // [padded], of q
#endif

  ByteScratch(float* memory, int64_t num_rows, int64_t padded) {
    scores = memory;
    scales = scores + num_rows * kChunk;
    starts = reinterpret_cast<int32_t*>(scales + num_rows);
    q = reinterpret_cast<QueryValue*>(starts + num_rows);
#if defined(__AVX512VNNI__)
    high = reinterpret_cast<uint8_t*>(q + num_rows * padded);
    low = high + num_rows * kChunk;
#else
    weights = q + num_rows * padded;
    row = reinterpret_cast<uint8_t*>(weights + num_rows * kChunk);
#endif
  }
  static int64_t size(int64_t num_rows, int64_t padded) {
#if defined(__AVX512VNNI__)
    return num_rows * (kChunk + 2 + padded / 4 + kChunk / 2);
#else
    return num_rows * (kChunk + 2 + padded / 2 + kChunk / 2) + padded / 4;
#endif
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
  QueryValue* const q = s.q + row * padded;
#if defined(__AVX512VNNI__)
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(q);
#else
  uint8_t* const bytes = s.row;
#endif
  quantize_row(a.type, a.q + (token * a.q_strides[0] + head * a.q_strides[1]) * value_bytes,
               a.head_dim, bytes, padded, s.scales + row);
  s.starts[row] = -128 * take_query(bytes, padded, q);
}

// Scores of kNumRows rows over kNumBlocks blocks.
template <int kNumRows, int kNumBlocks>
void score_bytes(const Attention& a, const ByteScratch& s, int64_t padded, const char* const* keys,
                 int64_t row, int64_t block) {
  const QueryValue* const q = s.q + row * padded;
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
    Fours x[kNumBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kNumBlocks; ++b) x[b] = unsigned_fours(k[b] + unit * kByteLine);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < kNumBlocks; ++b)
        sums[r][b] = add_products(sums[r][b], x[b], q + r * padded + unit * 4);
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
      DSPARK_CASE(3)
#if defined(__AVX512F__)
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
    const int64_t at = row * kChunk + b * kLanes;
#if defined(__AVX512VNNI__)
    store_bytes(s.low + at, whole);
    store_bytes(s.high + at, high_bytes(whole));
#else
    const Words x = sub_words(whole, splat_word(1 << 15));
    store_fours(s.weights + at, words_as_shorts(x));
#endif
  }
}

// Sums of weight times value for kNumRows rows and kGroups times 16 values from e on.
#if defined(__AVX512VNNI__)
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
#else
template <int kNumRows, int kGroups>
void add_byte_values(const ByteScratch& s, int64_t padded, const char* const* values, Range blocks,
                     int64_t row, int64_t e, float* out, int64_t out_stride) {
  static_assert(kChunk / 2 * 127 < 1 << 15);
  Words sums[kNumRows][kGroups];
  Words all[kGroups];  // values of two and two positions, in 16 bits
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    all[g] = zero_words();
#pragma GCC unroll 4
    for (int r = 0; r < kNumRows; ++r) sums[r][g] = zero_words();
  }
  const int16_t* const weights = s.weights + row * kChunk;
  for (int64_t b = blocks.low; b < blocks.high; ++b) {
    const char* v = values[b] + e * 4;
#pragma GCC unroll 1
    for (int64_t j = b * kLanes; j < (b + 1) * kLanes; j += 4, v += padded * 4) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Fours x = signed_fours(v + g * kByteLine);
        all[g] = add_shorts(all[g], add_shorts(x.even, x.odd));
#pragma GCC unroll 4
        for (int r = 0; r < kNumRows; ++r)
          sums[r][g] = add_products(sums[r][g], x, weights + r * kChunk + j);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) all[g] = sums_of_shorts(all[g]);
  // Weights lack 2^15: whole numbers of 2^15, and less than that, are both exact as float32.
#pragma GCC unroll 4
  for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const Words high = add_words(high_part(sums[r][g]), all[g]);
      store(out + r * out_stride + e + g * kLanes,
            mul(fma(to_floats(high), splat(32768.0f), to_floats(low_part(sums[r][g]))),
                splat(s.scales[row + r])));
    }
}
#endif

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
      case 2:
        add_byte_rows<2>(s, padded, at.values, blocks, row, out, row_stride);
        break;
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
