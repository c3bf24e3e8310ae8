// Products by vectors: a few tokens times a few groups of outputs, unit by unit.
#pragma once

#include "linear_outputs.h"

namespace dspark {
namespace DSPARK_ISA {

constexpr int64_t kPrefetchBytes = 3072;
constexpr int64_t kUnitsAtOnce = 8;  // between two times of asking memory for more
// Of so many tokens, weights that no stream asks for are read plainly: one panel after the other,
// so that the processor's own prefetching sees one line of addresses, and nothing is asked for
// (measured on Zen 4: two panels at once and asking took 9 to 17 % longer for one token).

#if defined(__AVX512F__)
constexpr int kTileGroups = 2, kTileTokens = 12;  // 24 of 32 registers are sums
constexpr int kWideGroups = 4, kWideTokens = 6;  // two panels, for few tokens
constexpr int kSplitTokens = 5;  // where an operand takes two registers
constexpr int64_t kPlainTokens = 4;
#else
constexpr int kTileGroups = 1, kTileTokens = 4;  // 8 of 16 registers are sums
constexpr int kWideGroups = 1, kWideTokens = 4;
constexpr int kSplitTokens = 4;
constexpr int64_t kPlainTokens = 0;
#endif

DSPARK_INLINE int32_t unit_at(const char* x) {
  int32_t bits;
  memcpy(&bits, x, sizeof bits);
  return bits;
}

struct DotFloat32 {
  static constexpr int kTokens = kTileTokens, kFewTokens = kWideTokens;
  static constexpr bool kIsInt8 = false;
  using Sum = Floats;
  using X = Floats;
  DSPARK_INLINE Sum start() { return zero(); }
  DSPARK_INLINE X broadcast(const char* x) {
    float value;
    memcpy(&value, x, sizeof value);
    return splat(value);
  }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
#if defined(__AVX512F__)
    return fma(x, _mm512_castsi512_ps(w), sum);
#else
    return fma(x, Floats{_mm256_castsi256_ps(w.a), _mm256_castsi256_ps(w.b)}, sum);
#endif
  }
};

#if defined(__AVX512BF16__)
struct DotBFloat16 {
  static constexpr int kTokens = kTileTokens, kFewTokens = kWideTokens;
  static constexpr bool kIsInt8 = false;
  using Sum = Floats;
  using X = __m512i;
  DSPARK_INLINE Sum start() { return zero(); }
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};
#else
struct DotBFloat16 {
  static constexpr int kTokens = kSplitTokens, kFewTokens = kSplitTokens;
  static constexpr bool kIsInt8 = false;
  using Sum = Floats;
  struct X {
    Floats low, high;
  };
  DSPARK_INLINE Sum start() { return zero(); }
  DSPARK_INLINE X broadcast(const char* x) {
    const uint32_t bits = static_cast<uint32_t>(unit_at(x));
    const uint32_t halves[2] = {bits << 16, bits & 0xffff0000u};
    float values[2];
    memcpy(values, halves, sizeof values);
    return {splat(values[0]), splat(values[1])};
  }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
#if defined(__AVX512F__)
    const Floats low = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    const Floats high =
        _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
#else
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    const Floats low = {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
                        _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
    const Floats high = {_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)),
                         _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
#endif
    return fma(x.high, high, fma(x.low, low, sum));
  }
};
#endif

#if defined(__AVX512VNNI__)
struct DotInt8 {
  static constexpr int kTokens = kTileTokens, kFewTokens = kWideTokens;
  static constexpr bool kIsInt8 = true;
  using Sum = Words;
  using X = Words;
  DSPARK_INLINE Sum start() { return zero_words(); }
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
  // Not the intrinsic: GCC 12 sees another type in it and keeps most of a tile's sums in memory.
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
};
#else
// Without VNNI: 16-bit products, because the 8-bit instruction of AVX2 saturates.
struct DotInt8 {
  static constexpr int kTokens = kSplitTokens, kFewTokens = kSplitTokens;
  static constexpr bool kIsInt8 = true;
  using Sum = Words;
  struct X {
    __m256i even, odd;
  };
  DSPARK_INLINE Sum start() { return zero_words(); }
  DSPARK_INLINE X broadcast(const char* x) {
    const __m256i all = _mm256_set1_epi32(unit_at(x));
    const __m256i mask = _mm256_set1_epi16(0xff);
    return {_mm256_and_si256(all, mask), _mm256_srli_epi16(all, 8)};
  }
  DSPARK_INLINE __m256i half(__m256i sum, X x, __m256i w) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
    const __m256i odd = _mm256_srai_epi16(w, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x.even, even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x.odd, odd));
  }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) { return {half(sum.a, x, w.a), half(sum.b, x, w.b)}; }
};
#endif

DSPARK_INLINE bool is_plain(const Linear& a) {
  return a.stream == nullptr && a.num_tokens <= kPlainTokens;
}

// kTokens tokens times kGroups groups of 16 outputs, which lie in panels of `stride` bytes a unit
// and `panel_bytes` in all.
template <class Dot, int kTokens, int kGroups>
void tile(const Linear& a, const char* weights, int64_t stride, int64_t panel_bytes, int64_t token,
          int64_t output, Ahead ahead) {
  typename Dot::Sum sums[kTokens][kGroups];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sums[t][g] = Dot::start();

  // Rows by threes: an address is a base and no, one or two strides, not a register of its own.
  constexpr int kBases = (kTokens + 2) / 3;
  const char* x[kBases];
#pragma GCC unroll 4
  for (int i = 0; i < kBases; ++i) x[i] = a.x + (token + 3 * i) * a.x_stride;
  const int64_t x_stride = a.x_stride;
  // Some units; `distance`: from their weights to those that are asked for meanwhile, 0: to none.
  const auto add_units = [&](int64_t count, int64_t distance) __attribute__((always_inline)) {
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < count; ++unit) {
      Words w[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g)
        w[g] = load_words(weights + g / kPanelGroups * panel_bytes + g % kPanelGroups * kUnitBytes);
      if (distance != 0)
#pragma GCC unroll 4
        for (int g = 0; g < (kGroups > kPanelGroups ? kGroups : kPanelGroups); ++g)
          _mm_prefetch(weights + g / kPanelGroups * panel_bytes + g % kPanelGroups * kUnitBytes +
                           distance, _MM_HINT_T0);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        const typename Dot::X value = Dot::broadcast(x[t / 3] + t % 3 * x_stride);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) sums[t][g] = Dot::step(sums[t][g], value, w[g]);
      }
      weights += stride;
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) x[i] += 4;
    }
  };
  // Memory is asked in between: within the loop that would push sums out of their registers.
  for (int64_t unit = 0; unit < a.num_units; unit += kUnitsAtOnce) {
    const int64_t left = a.num_units - unit, count = left < kUnitsAtOnce ? left : kUnitsAtOnce;
    if (ahead.is_near) {
      if (ahead.stream != nullptr) ask(*ahead.stream, count * ahead.stream_lines_per_step);
      // Two panels end at the same time, and what follows the first is the second.
      const bool is_past_end = kGroups > kPanelGroups && left * stride <= kPrefetchBytes;
      add_units(count, kPrefetchBytes + (is_past_end ? panel_bytes : 0));
    } else {
      step(ahead, count);
      add_units(count, 0);
    }
  }

  Outputs outputs[kGroups];
  for (int g = 0; g < kGroups; ++g) outputs[g] = outputs_at<Dot::kIsInt8>(a, output + g * kLanes);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    Floats values[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) values[g] = finish(a, outputs[g], sums[t][g], token + t);
    write<kGroups>(a, values, token + t, output);
  }
}

template <class Dot, int kMostTokens, int kGroups>
void tile_of(int num_tokens, const Linear& a, const char* weights, int64_t stride,
             int64_t panel_bytes, int64_t token, int64_t output, Ahead ahead) {
  switch (num_tokens) {
#define DSPARK_CASE(n)                                                                         \
  case n:                                                                                      \
    if constexpr (n <= kMostTokens)                                                            \
      return tile<Dot, n, kGroups>(a, weights, stride, panel_bytes, token, output, ahead);     \
    break;
    DSPARK_CASE(1)
    DSPARK_CASE(2)
    DSPARK_CASE(3)
    DSPARK_CASE(4)
    DSPARK_CASE(5)
    DSPARK_CASE(6)
    DSPARK_CASE(7)
    DSPARK_CASE(8)
    DSPARK_CASE(9)
    DSPARK_CASE(10)
    DSPARK_CASE(11)
    DSPARK_CASE(12)
#undef DSPARK_CASE
  }
}

// All tokens times the groups of outputs from `first_group` on, in one or two panels.
struct Region {
  const char* begin;
  const char* end;
  const char* next_end;  // of the region that is read after it
  int64_t panel_bytes;
  int64_t first_group, num_groups;
  bool is_first;  // of the call
};

template <class Dot, int kMostTokens, int kGroups>
void region_product(const Linear& a, const Region& r) {
  const int64_t num_tiles = (a.num_tokens + kMostTokens - 1) / kMostTokens;
  const int64_t num_visits = r.num_groups / kGroups * num_tiles;
  const int64_t width = r.num_groups < kPanelGroups ? r.num_groups : kPanelGroups;
  int64_t visit = 0;
  for (int64_t group = 0; group < r.num_groups; group += kGroups)
    for (int64_t i = 0; i < num_tiles; ++i) {  // tiles of equal size, give or take one token
      const int64_t token = i * a.num_tokens / num_tiles;
      const int count = static_cast<int>((i + 1) * a.num_tokens / num_tiles - token);
      const Ahead ahead = is_plain(a) ? Ahead{}
                                      : ahead_of(a, visit++, num_visits, a.num_units, r.is_first,
                                                 r.begin, r.end, r.next_end, kPrefetchBytes);
      tile_of<Dot, kMostTokens, kGroups>(count, a, r.begin + group * kUnitBytes,
                                         width * kUnitBytes, r.panel_bytes, token,
                                         (r.first_group + group) * kGroup, ahead);
    }
}

template <class Dot>
void panels(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  const int64_t group_bytes = a.num_units * kUnitBytes;
  const int64_t num_groups = (a.num_outputs + kGroup - 1) / kGroup;
  const int64_t last = panel_end * kPanelGroups < num_groups ? panel_end * kPanelGroups : num_groups;
  const bool are_few = a.num_tokens <= Dot::kFewTokens || Dot::kTokens <= Dot::kFewTokens;
  const bool is_wide = are_few && kWideGroups > kPanelGroups && !is_plain(a);
  const int64_t most = is_wide ? kWideGroups : kPanelGroups;
  for (int64_t group = panel_begin * kPanelGroups; group < last;) {
    const int64_t left = last - group;
    Region r = {};
    r.num_groups = left >= most ? most : left >= kPanelGroups ? kPanelGroups : left;
    r.first_group = group;
    r.begin = a.packed + group * group_bytes;
    r.end = r.begin + r.num_groups * group_bytes;
    r.next_end = left >= 2 * r.num_groups ? r.end + (r.end - r.begin) : a.packed + last * group_bytes;
    r.panel_bytes = kPanelGroups * group_bytes;
    r.is_first = group == panel_begin * kPanelGroups;
    if (r.num_groups == kWideGroups)
      region_product<Dot, Dot::kFewTokens, kWideGroups>(a, r);
    else if (r.num_groups == kPanelGroups)
      region_product<Dot, Dot::kTokens, kTileGroups>(a, r);
    else
      region_product<Dot, Dot::kTokens, 1>(a, r);
    group += r.num_groups;
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark
