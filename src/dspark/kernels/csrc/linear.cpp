// Products with packed weights. Each (token, output) sum runs over the inputs from first to last
// in one accumulator, whatever the tile shape: its bits depend on the token and the weights only.
#include "kernels.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileTokens = 8;  // 8 x 3 accumulators, 3 weights, 1 broadcast of 32 registers
constexpr int kTileGroups = static_cast<int>(kPanelGroups);
#else
constexpr int kTileTokens = 4;  // 4 x 2 accumulators and operands of 16 registers
constexpr int kTileGroups = 1;
#endif
constexpr int64_t kUnitBytes = 64;  // one unit of 16 outputs
constexpr int64_t kPrefetchBytes = 3072;

DSPARK_INLINE int32_t unit_at(const char* x) {
  int32_t bits;
  memcpy(&bits, x, sizeof bits);
  return bits;
}

struct DotFloat32 {
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
  using Sum = Words;
  using X = Words;
  DSPARK_INLINE Sum start() { return zero_words(); }
  DSPARK_INLINE X broadcast(const char* x) { return _mm512_set1_epi32(unit_at(x)); }
  DSPARK_INLINE Sum step(Sum sum, X x, Words w) { return _mm512_dpbusd_epi32(sum, x, w); }
};
#else
// Without VNNI: 16-bit products, because the 8-bit instruction of AVX2 saturates.
struct DotInt8 {
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

DSPARK_INLINE Floats finish(const Linear&, Floats sum, int64_t, int64_t, int64_t) { return sum; }

DSPARK_INLINE Floats load_up_to(const float* p, int64_t count) {
  return count == kLanes ? load(p) : load_some(p, count);
}

DSPARK_INLINE Words load_words_up_to(const int32_t* p, int64_t count) {
  if (count == kLanes) return load_words(p);
  int32_t values[kLanes] = {};
  memcpy(values, p, static_cast<size_t>(count) * sizeof(int32_t));
  return load_words(values);
}

// The 128 that was added to each input is taken off as 128 times the sum of the weights.
DSPARK_INLINE Floats finish(const Linear& a, Words sum, int64_t token, int64_t output,
                            int64_t count) {
  const Words shift = times_128(load_words_up_to(a.output_sums + output, count));
  const Floats value = mul(to_floats(sub_words(sum, shift)), splat(a.token_scales[token]));
  return mul(value, load_up_to(a.output_scales + output, count));
}

DSPARK_INLINE void write(const Linear& a, Floats value, int64_t token, int64_t output,
                         int64_t count) {
  if (a.bias != nullptr) value = add(value, load_up_to(a.bias + output, count));
  const int64_t at = token * a.out_stride + output;
  if (a.out_type == Type::kBFloat16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(a.out) + at;
    if (count == kLanes) store(out, value);
    else store_some(out, value, count);
  } else {
    float* out = reinterpret_cast<float*>(a.out) + at;
    if (count == kLanes) store(out, value);
    else store_some(out, value, count);
  }
}

// kTokens tokens times kGroups groups of 16 outputs; `stride` bytes from one unit to the next.
template <class Dot, int kTokens, int kGroups>
void tile(const Linear& a, const char* weights, int64_t stride, int64_t token, int64_t output) {
  typename Dot::Sum sums[kTokens][kGroups];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) sums[t][g] = Dot::start();

  const char* x = a.x + token * a.x_stride;
  for (int64_t unit = 0; unit < a.num_units; ++unit) {
    Words w[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      w[g] = load_words(weights + g * kUnitBytes);
      _mm_prefetch(weights + g * kUnitBytes + kPrefetchBytes, _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const typename Dot::X value = Dot::broadcast(x + t * a.x_stride);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) sums[t][g] = Dot::step(sums[t][g], value, w[g]);
    }
    weights += stride;
    x += 4;
  }

#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const int64_t first = output + g * kLanes;
      const int64_t left = a.num_outputs - first;
      const int64_t count = left < kLanes ? left : kLanes;
      write(a, finish(a, sums[t][g], token + t, first, count), token + t, first, count);
    }
}

template <class Dot, int kGroups>
void tile_of(int num_tokens, const Linear& a, const char* weights, int64_t stride, int64_t token,
             int64_t output) {
  switch (num_tokens) {
#define DSPARK_CASE(n)                                                           \
  case n:                                                                        \
    if constexpr (n <= kTileTokens)                                              \
      return tile<Dot, n, kGroups>(a, weights, stride, token, output);           \
    break;
    DSPARK_CASE(1)
    DSPARK_CASE(2)
    DSPARK_CASE(3)
    DSPARK_CASE(4)
    DSPARK_CASE(5)
    DSPARK_CASE(6)
    DSPARK_CASE(7)
    DSPARK_CASE(8)
#undef DSPARK_CASE
  }
}

template <class Dot>
void panels(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  const int64_t num_groups = (a.num_outputs + kGroup - 1) / kGroup;
  const int64_t num_tiles = (a.num_tokens + kTileTokens - 1) / kTileTokens;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first_group = panel * kPanelGroups;
    const int64_t left = num_groups - first_group;
    const int64_t width = left < kPanelGroups ? left : kPanelGroups;
    const char* weights = a.packed + first_group * a.num_units * kUnitBytes;
    for (int64_t group = 0; group < width; group += kTileGroups) {
      const int64_t output = (first_group + group) * kGroup;
      for (int64_t i = 0; i < num_tiles; ++i) {  // tiles of equal size, give or take one token
        const int64_t begin = i * a.num_tokens / num_tiles;
        const int count = static_cast<int>((i + 1) * a.num_tokens / num_tiles - begin);
        const char* first = weights + group * kUnitBytes;
        const int64_t stride = width * kUnitBytes;
        if (kTileGroups == 1 || width == 1) tile_of<Dot, 1>(count, a, first, stride, begin, output);
        else if (width == 2) tile_of<Dot, kTileGroups == 1 ? 1 : 2>(count, a, first, stride, begin, output);
        else tile_of<Dot, kTileGroups>(count, a, first, stride, begin, output);
      }
    }
  }
}

#if defined(__AMX_TILE__)
// Tiles of 16 tokens by 16 outputs by 16 units. A row of the product depends on its token alone,
// and one pass over a panel serves 16 tokens at the price of one.
constexpr int64_t kTileUnits = 16;
constexpr int64_t kTilePrefetchBytes = 8192;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-2 are sums, 3 holds tokens, 4-6 weights.
DSPARK_INLINE void configure_tiles(int num_tokens) {
  TileConfig config;
  for (int i = 0; i < 7; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 4 ? num_tokens : kTileUnits);
  }
  _tile_loadconfig(&config);
}

template <bool kIsInt8, int kGroups>
void tile_panel(const Linear& a, const char* weights, int64_t token, int num_tokens,
                int64_t output, bool prefetches) {
  constexpr int64_t stride = kGroups * kUnitBytes;
  const char* x = a.x + token * a.x_stride;
  _tile_zero(0);
  if constexpr (kGroups > 1) _tile_zero(1);
  if constexpr (kGroups > 2) _tile_zero(2);
  for (int64_t unit = 0; unit < a.num_units; unit += kTileUnits) {
    if (prefetches)
      for (int64_t i = 0; i < kTileUnits * kGroups; ++i)
        _mm_prefetch(weights + kTilePrefetchBytes + i * kUnitBytes, _MM_HINT_T0);
    _tile_loadd(3, x, static_cast<int>(a.x_stride));
    _tile_loadd(4, weights, stride);
    if constexpr (kIsInt8) _tile_dpbusd(0, 3, 4);
    else _tile_dpbf16ps(0, 3, 4);
    if constexpr (kGroups > 1) {
      _tile_loadd(5, weights + kUnitBytes, stride);
      if constexpr (kIsInt8) _tile_dpbusd(1, 3, 5);
      else _tile_dpbf16ps(1, 3, 5);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(6, weights + 2 * kUnitBytes, stride);
      if constexpr (kIsInt8) _tile_dpbusd(2, 3, 6);
      else _tile_dpbf16ps(2, 3, 6);
    }
    weights += kTileUnits * stride;
    x += kTileUnits * 4;
  }
  alignas(64) char sums[kGroups][16][64];
  _tile_stored(0, sums[0], 64);
  if constexpr (kGroups > 1) _tile_stored(1, sums[1], 64);
  if constexpr (kGroups > 2) _tile_stored(2, sums[2], 64);
  for (int t = 0; t < num_tokens; ++t)
    for (int g = 0; g < kGroups; ++g) {
      const int64_t first = output + g * kLanes;
      const int64_t left = a.num_outputs - first;
      const int64_t count = left < kLanes ? left : kLanes;
      Floats value;
      if constexpr (kIsInt8)
        value = finish(a, load_words(sums[g][t]), token + t, first, count);
      else
        value = _mm512_load_ps(sums[g][t]);
      write(a, value, token + t, first, count);
    }
}

template <bool kIsInt8>
void tile_panels(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  const int64_t num_groups = (a.num_outputs + kGroup - 1) / kGroup;
  const int full = a.num_tokens < 16 ? static_cast<int>(a.num_tokens) : 16;
  int configured = full;
  configure_tiles(full);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first_group = panel * kPanelGroups;
    const int64_t left = num_groups - first_group;
    const char* weights = a.packed + first_group * a.num_units * kUnitBytes;
    const int64_t output = first_group * kGroup;
    for (int64_t token = 0; token < a.num_tokens; token += 16) {
      const int64_t rest = a.num_tokens - token;
      const int count = rest < 16 ? static_cast<int>(rest) : 16;
      if (count != configured) configure_tiles(configured = count);
      const bool is_first = token == 0;
      if (left >= 3) tile_panel<kIsInt8, 3>(a, weights, token, count, output, is_first);
      else if (left == 2) tile_panel<kIsInt8, 2>(a, weights, token, count, output, is_first);
      else tile_panel<kIsInt8, 1>(a, weights, token, count, output, is_first);
    }
  }
  _tile_release();
}
#endif

template <class T>
void quantize(const T* x, int64_t width, uint8_t* out, int64_t padded, float* scale) {
  const int64_t whole = width / kLanes * kLanes;
  Words bits = zero_words();
  for (int64_t i = 0; i < whole; i += kLanes) bits = max_unsigned(bits, magnitude(load(x + i)));
  if (whole < width)
    bits = max_unsigned(bits, magnitude(load_some(x + whole, width - whole)));
  uint32_t lanes[kLanes];
  store_words(lanes, bits);
  for (int i = 1; i < kLanes; ++i) lanes[0] = lanes[0] < lanes[i] ? lanes[i] : lanes[0];
  float largest;
  memcpy(&largest, lanes, sizeof largest);
  const Floats inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
  *scale = largest / 127.0f;
  // A value that is not finite may become any byte: the scale is not finite either.
  for (int64_t i = 0; i < whole; i += kLanes)
    store_shifted_bytes(out + i, round_even(mul(load(x + i), inverse)));
  if (whole < width) {
    uint8_t bytes[kLanes];
    const Floats rest = load_some(x + whole, width - whole);
    store_shifted_bytes(bytes, round_even(mul(rest, inverse)));
    memcpy(out + whole, bytes, static_cast<size_t>(width - whole));
  }
  for (int64_t i = width; i < padded; ++i) out[i] = 128;
}

}  // namespace

void linear(const Linear& a, int64_t panel_begin, int64_t panel_end) {
#if defined(__AMX_TILE__)
  // The shape of the weight alone decides: a layer never mixes two orders of summation.
  if (a.num_units % kTileUnits == 0 && a.weights == Weights::kBFloat16)
    return tile_panels<false>(a, panel_begin, panel_end);
  if (a.num_units % kTileUnits == 0 && a.weights == Weights::kInt8)
    return tile_panels<true>(a, panel_begin, panel_end);
#endif
  switch (a.weights) {
    case Weights::kFloat32:
      return panels<DotFloat32>(a, panel_begin, panel_end);
    case Weights::kBFloat16:
      return panels<DotBFloat16>(a, panel_begin, panel_end);
    case Weights::kInt8:
      return panels<DotInt8>(a, panel_begin, panel_end);
  }
}

void quantize_row(Type type, const char* x, int64_t width, uint8_t* out, int64_t padded,
                  float* scale) {
  if (type == Type::kBFloat16)
    quantize(reinterpret_cast<const uint16_t*>(x), width, out, padded, scale);
  else
    quantize(reinterpret_cast<const float*>(x), width, out, padded, scale);
}

}  // namespace DSPARK_ISA
}  // namespace dspark
