// Products by vectors: a few tokens times a few groups of outputs, unit by unit.
#pragma once

#include <stdlib.h>

#include "linear_outputs.h"
#include "short_pairs.h"

namespace dspark {
namespace DSPARK_ISA {

constexpr int64_t kPrefetchBytes = 3072;
constexpr int64_t kRowBytes = 1 << 20;  // of rows that are written out at a time
constexpr int64_t kUnitsAtOnce = 8;  // between two times of asking memory for more
constexpr int64_t kManyUnits = 32;  // the same where products take far longer
constexpr int64_t kManyTokens = 24;

#if defined(__AVX512F__)
constexpr int kTileGroups = 2, kTileTokens = 12;  // 24 of 32 registers are sums
constexpr int kWideGroups = 4, kWideTokens = 6;  // two panels, for few tokens
constexpr int kGroupsAtOnce = 4;  // that share what is loaded of a token
#if defined(__AVX512VNNI__)
constexpr int kSplitTokens = 5, kSplitFewTokens = 5;  // where an operand takes two registers
constexpr int64_t kPlainTokens = 4;
constexpr bool kAsksEvenly = false;
constexpr bool kAsksByUnit = false;
#else
constexpr int kSplitTokens = kTileTokens, kSplitFewTokens = 5;
constexpr int64_t kPlainTokens = 0;
constexpr bool kAsksEvenly = true;
// Whether visits to whole panels ask memory with each unit only, and never between units: leaving
// the loop for that costs about as much as a unit, and many lines at once keep those waiting that
// the second-level cache has (measured on Skylake-SP, products alone, two threads: 8 tokens in
// bfloat16 13 % faster, 16 tokens 18 %, in bytes 20 %).
constexpr bool kAsksByUnit = true;
#endif
#else
// 12 of 16 registers are sums: as many as it takes to add one in each cycle and pipe. Of a whole
// panel, whose lines are then read in their order.
constexpr int kTileGroups = 2, kTileTokens = 3;
constexpr int kWideGroups = kTileGroups, kWideTokens = kTileTokens;
constexpr int kSplitTokens = kTileTokens, kSplitFewTokens = kTileTokens;
constexpr int kGroupsAtOnce = 1;
constexpr int64_t kPlainTokens = 0;
// A visit that asks for weights to come does so until its last unit, not as many lines at each as
// make a whole number (measured on Zen 3: 8 tokens took 8 % longer so in bfloat16, 30 % in float32,
// and as long in bytes).
constexpr bool kAsksEvenly = true;
constexpr bool kAsksByUnit = false;
#endif

// Of so many tokens, weights that no stream asks for are read plainly: one panel after the other,
// so that the processor's own prefetching sees one line of addresses, and nothing is asked for
// (measured on Zen 4: two panels at once and asking took 9 to 17 % longer for one token). With AVX2
// none (measured on Zen 3: plainly, 2 and 3 tokens in bytes or bfloat16 took 5 to 25 % longer; one
// token did not differ beyond the noise, and float32 was up to 18 % faster plainly), nor with AVX-512
// without VNNI (measured on Skylake-SP, which reads 12 GB/s plainly and 18 if it is asked: one token
// in bfloat16 took 22 and 15 ms, 4 tokens 26 and 15).
DSPARK_INLINE bool is_plain(const Linear& a) {
  return a.stream == nullptr && a.num_tokens <= kPlainTokens;
}

DSPARK_INLINE int32_t unit_at(const char* x) {
  int32_t bits;
  memcpy(&bits, x, sizeof bits);
  return bits;
}

// A way to multiply: kParts steps for each unit, one after the other. Of rows that take two steps
// each unit is written out beforehand, once for all outputs, so that a step loads its part of a
// token's unit into every lane and does nothing else to it.
struct DotFloat32 {
  static constexpr int kTokens = kTileTokens, kGroups = kTileGroups, kFewTokens = kWideTokens;
  static constexpr int kParts = 1;
  static constexpr bool kIsInt8 = false;
  using Sum = Floats;
  using X = Floats;
  DSPARK_INLINE Sum start() { return zero(); }
  template <int>
  DSPARK_INLINE Words part(Words w) {
    return w;
  }
#if defined(__AVX512F__)
  DSPARK_INLINE X broadcast(const char* x) {
    float value;
    memcpy(&value, x, sizeof value);
    return splat(value);
  }
#else
  // Not the intrinsic: GCC 12 would load every token's value first, and push sums out for them.
  DSPARK_INLINE X broadcast(const char* x) {
    __m256 value;
    asm volatile("vbroadcastss %1, %0" : "=x"(value) : "m"(*reinterpret_cast<const float*>(x)));
    return {value, value};
  }
#endif
#if defined(__AVX512F__)
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) { return fma(x, as_floats(w), sum); }
#else
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.a) : "x"(x.a), "x"(w.a));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.b) : "x"(x.a), "x"(w.b));
    return sum;
  }
#endif
};

#if defined(__AVX512BF16__)
struct DotBFloat16 {
  static constexpr int kTokens = kTileTokens, kGroups = kTileGroups, kFewTokens = kWideTokens;
  static constexpr int kParts = 1;
  static constexpr bool kIsInt8 = false;
  using Sum = Floats;
  using X = __m512i;
  DSPARK_INLINE Sum start() { return zero(); }
  template <int>
  DSPARK_INLINE Words part(Words w) {
    return w;
  }
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};
#else
// As float32: the values of even inputs, then those of odd ones.
struct DotBFloat16 : DotFloat32 {
  static constexpr int kTokens = kSplitTokens, kFewTokens = kSplitFewTokens, kParts = 2;
  template <int kPart>
  DSPARK_INLINE Words part(Words w) {
    return kPart == 0 ? low_shorts_up(w) : high_shorts(w);
  }
#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
  // Not the intrinsic: GCC 12 keeps some of 24 sums in memory.
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
#endif
  DSPARK_INLINE void write_out(const char* row, int64_t num_units, char* out) {
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(row);
    float* const to = reinterpret_cast<float*>(out);
    const int64_t count = 2 * num_units, whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(x + i));
    if (whole < count) store_some(to + whole, load_some(x + whole, count - whole), count - whole);
  }
};
#endif

#if defined(__AVX512VNNI__)
struct DotInt8 {
  static constexpr int kTokens = kTileTokens, kGroups = kTileGroups, kFewTokens = kWideTokens;
  static constexpr int kParts = 1;
  static constexpr bool kIsInt8 = true;
  using Sum = Words;
  using X = Words;
  DSPARK_INLINE Sum start() { return zero_words(); }
  template <int>
  DSPARK_INLINE Words part(Words w) {
    return w;
  }
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
  // Not the intrinsic: GCC 12 sees another type in it and keeps most of a tile's sums in memory.
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
};
#else
// Without VNNI: even inputs, then odd ones.
struct DotInt8 {
#if defined(__AVX512F__)
  static constexpr int kTokens = kTileTokens, kGroups = kTileGroups, kFewTokens = kSplitFewTokens;
#else
  // Sums are there at once, but parts of weights take time: more tokens share them.
  static constexpr int kTokens = 6, kGroups = 1, kFewTokens = 3;
#endif
  static constexpr int kParts = 2;
  static constexpr bool kIsInt8 = true;
  using Sum = Words;
  using X = Repeated;
  DSPARK_INLINE Sum start() { return zero_words(); }
  template <int kPart>
  DSPARK_INLINE Words part(Words w) {
    return kPart == 0 ? signed_low_bytes(w) : signed_upper_bytes(w);
  }
#if defined(__AVX512F__)
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
#else
  DSPARK_INLINE X broadcast(const char* x) { return _mm256_set1_epi32(unit_at(x)); }
#endif
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) { return add_pairs(sum, w, x); }
  DSPARK_INLINE void write_out(const char* row, int64_t num_units, char* out) {
    const __m256i mask = _mm256_set1_epi16(0xff);
    int64_t unit = 0;
    for (; unit + 8 <= num_units; unit += 8) {
      // Units 0, 1, 4, 5, 2, 3, 6, 7: interleaving goes by 128-bit lanes.
      const __m256i units = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + unit * 4));
      const __m256i bytes = _mm256_permute4x64_epi64(units, 0xd8);
      const __m256i even = _mm256_and_si256(bytes, mask), odd = _mm256_srli_epi16(bytes, 8);
      __m256i* const to = reinterpret_cast<__m256i*>(out + unit * 8);
      _mm256_storeu_si256(to, _mm256_unpacklo_epi32(even, odd));
      _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi32(even, odd));
    }
    for (; unit < num_units; ++unit) {
      const uint32_t bytes = static_cast<uint32_t>(unit_at(row + unit * 4));
      const uint32_t pairs[2] = {bytes & 0xff00ff, bytes >> 8 & 0xff00ff};
      memcpy(out + unit * 8, pairs, sizeof pairs);
    }
  }
};
#endif

// One step of a unit of all tokens, for some groups from kFirst on.
template <class Dot, int kPart, int kFirst, int kTokens, int kGroups>
DSPARK_INLINE void add_part(typename Dot::Sum (&sums)[kTokens][kGroups], const char* const* x,
                            int64_t x_stride, const char* weights, int64_t panel_bytes) {
  constexpr int kCount = kGroups - kFirst < kGroupsAtOnce ? kGroups - kFirst : kGroupsAtOnce;
  Words w[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i)
    w[i] = Dot::template part<kPart>(
        load_words(weights + (kFirst + i) / kPanelGroups * panel_bytes +
                   (kFirst + i) % kPanelGroups * kUnitBytes));
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const typename Dot::X value = Dot::broadcast(x[t / 3] + t % 3 * x_stride + 4 * kPart);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i)
      sums[t][kFirst + i] = Dot::step(sums[t][kFirst + i], value, w[i]);
  }
  if constexpr (kFirst + kCount < kGroups)
    add_part<Dot, kPart, kFirst + kCount>(sums, x, x_stride, weights, panel_bytes);
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
  // Some units; `distance`: from their weights to those that are asked for meanwhile, `apart`: to
  // the one line that is; 0: to none.
  const auto add_units = [&](int64_t count, int64_t distance,
                             int64_t apart) __attribute__((always_inline)) {
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < count; ++unit) {
      if (distance != 0)
#pragma GCC unroll 4
        for (int g = 0; g < (kGroups > kPanelGroups ? kGroups : kPanelGroups); ++g)
          _mm_prefetch(weights + g / kPanelGroups * panel_bytes + g % kPanelGroups * kUnitBytes +
                           distance, _MM_HINT_T0);
      if (apart != 0) _mm_prefetch(weights + apart, _MM_HINT_T1);
      add_part<Dot, 0, 0>(sums, x, x_stride, weights, panel_bytes);
      if constexpr (Dot::kParts == 2)
        add_part<Dot, 1, 0>(sums, x, x_stride, weights, panel_bytes);
      weights += stride;
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) x[i] += 4 * Dot::kParts;
    }
  };
  const int64_t num_lines = ahead.end > ahead.next ? (ahead.end - ahead.next) / kUnitBytes : 0;
  const auto lines_until = [&](int64_t unit) { return num_lines * unit / a.num_units; };
  // Memory is asked in between: within the loop that would push sums out of their registers.
  const bool is_by_unit = kAsksByUnit && ahead.is_by_unit;
  const int64_t at_once = is_by_unit ? a.num_units
                          : kAsksEvenly && a.num_tokens > kManyTokens ? kManyUnits
                                                                      : kUnitsAtOnce;
  for (int64_t unit = 0; unit < a.num_units; unit += at_once) {
    const int64_t left = a.num_units - unit, count = left < at_once ? left : at_once;
    if (is_by_unit && !ahead.is_near) {
      if (ahead.apart != 0) add_units(count, 0, ahead.apart);
      else add_units(count, 0, 0);
    } else if (ahead.is_near) {
      if (ahead.stream != nullptr) ask(*ahead.stream, count * ahead.stream_lines_per_step);
      // Two panels end at the same time, and what follows the first is the second.
      const bool is_past_end = kGroups > kPanelGroups && left * stride <= kPrefetchBytes;
      add_units(count, kPrefetchBytes + (is_past_end ? panel_bytes : 0), 0);
    } else {
      if constexpr (kAsksEvenly)
        ahead.lines_per_step = lines_until(unit + count) - lines_until(unit);
      step(ahead, kAsksEvenly ? 1 : count);
      add_units(count, 0, 0);
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

// What a visit asks for with each unit: the first visit to a call's first panel asks for that panel
// itself, shortly before use. Of the others the first ask for the panel that comes next, each for the
// lines of one of its groups.
DSPARK_INLINE void ask_by_unit(Ahead& ahead, const Region& r, int64_t visit) {
  ahead.is_by_unit = true;
  const int64_t group = visit - r.is_first;
  const bool asks = !ahead.is_near && group < kPanelGroups && r.next_end > r.end;
  ahead.apart = asks ? r.end - r.begin + group * kUnitBytes : 0;
}

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
      Ahead ahead = is_plain(a) ? Ahead{}
                                : ahead_of(a, visit, num_visits, a.num_units, r.is_first, r.begin,
                                           r.end, r.next_end, kPrefetchBytes);
      if (kAsksByUnit && kGroups == kPanelGroups && a.stream == nullptr)
        ask_by_unit(ahead, r, visit);
      ++visit;
      tile_of<Dot, kMostTokens, kGroups>(count, a, r.begin + group * kUnitBytes,
                                         width * kUnitBytes, r.panel_bytes, token,
                                         (r.first_group + group) * kGroup, ahead);
    }
}

template <class Dot>
void panels_of_rows(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  const int64_t group_bytes = a.num_units * kUnitBytes;
  const int64_t num_groups = (a.num_outputs + kGroup - 1) / kGroup;
  const int64_t last = panel_end * kPanelGroups < num_groups ? panel_end * kPanelGroups : num_groups;
  const bool are_few = a.num_tokens <= Dot::kFewTokens || Dot::kTokens <= Dot::kFewTokens;
  const bool is_wide = are_few && (kWideGroups <= kPanelGroups || !is_plain(a));
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
    if (is_wide && r.num_groups == kWideGroups)
      region_product<Dot, Dot::kFewTokens, kWideGroups>(a, r);
    else if (r.num_groups == kPanelGroups)
      region_product<Dot, Dot::kTokens, Dot::kGroups>(a, r);
    else
      region_product<Dot, Dot::kTokens, 1>(a, r);
    group += r.num_groups;
  }
}

// Memory of a thread that only grows.
struct RowScratch {
  char* data = nullptr;
  size_t size = 0;

  ~RowScratch() { free(data); }
  char* get(size_t wanted) {
    if (wanted > size) {
      free(data);
      data = static_cast<char*>(aligned_alloc(64, wanted));
      size = data == nullptr ? 0 : wanted;
      if (data == nullptr) abort();
    }
    return data;
  }
};

template <class Dot>
void panels(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  if constexpr (Dot::kParts == 1) {
    panels_of_rows<Dot>(a, panel_begin, panel_end);
  } else {
    static thread_local RowScratch scratch;
    // A line between two rows, so that rows of a power of two do not share their places in a cache.
    const int64_t stride = ((a.num_units * 4 * Dot::kParts + 63) / 64 + 1) * 64;
    const int64_t fitting = kRowBytes / stride / Dot::kTokens * Dot::kTokens;
    const int64_t most = a.stream != nullptr || a.num_tokens <= fitting ? a.num_tokens
                         : fitting > Dot::kTokens ? fitting : Dot::kTokens;
    char* const rows = scratch.get(static_cast<size_t>(most * stride));
    for (int64_t token = 0; token < a.num_tokens; token += most) {
      const int64_t count = a.num_tokens - token < most ? a.num_tokens - token : most;
      for (int64_t n = 0; n < count; ++n)
        Dot::write_out(a.x + (token + n) * a.x_stride, a.num_units, rows + n * stride);
      Linear part = a;
      part.x = rows;
      part.x_stride = stride;
      part.num_tokens = count;
      if (a.token_scales != nullptr) part.token_scales += token;
      part.out += token * a.out_stride * (a.out_type == Type::kBFloat16 ? 2 : 4);
      panels_of_rows<Dot>(part, panel_begin, panel_end);
    }
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark
