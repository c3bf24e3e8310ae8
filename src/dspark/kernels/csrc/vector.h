// Sixteen float32 lanes, as one AVX-512 register or two AVX2 registers; nothing else knows which.
// Files that include this are compiled once per instruction set into namespace DSPARK_ISA. They
// include no library header with inline code, which a linker could mix up between the sets.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define DSPARK_INLINE static inline __attribute__((always_inline))

namespace dspark {
namespace DSPARK_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

using Floats = __m512;
using Words = __m512i;

DSPARK_INLINE Floats zero() { return _mm512_setzero_ps(); }
DSPARK_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
DSPARK_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
DSPARK_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
DSPARK_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
DSPARK_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
DSPARK_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
DSPARK_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
DSPARK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
DSPARK_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one is NaN
DSPARK_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
DSPARK_INLINE Words zero_words() { return _mm512_setzero_si512(); }
DSPARK_INLINE Words splat_word(int32_t x) { return _mm512_set1_epi32(x); }
DSPARK_INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
DSPARK_INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
DSPARK_INLINE Words as_words(Floats x) { return _mm512_castps_si512(x); }

DSPARK_INLINE Floats load_bf16(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// The bits of x rounded to bfloat16 in the upper halves: to nearest, ties to even; NaN stays NaN.
// The lower halves are anything.
DSPARK_INLINE Words round_bf16(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
}
DSPARK_INLINE void store_bf16(uint16_t* p, Floats x) {
  const __m256i y = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), y);
}
// x as bfloat16 holds it.
DSPARK_INLINE Floats rounded_bf16(Floats x) {
  return _mm512_castsi512_ps(_mm512_and_si512(round_bf16(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// 32 values of 16 bits, without their signs.
DSPARK_INLINE Words short_magnitudes(const uint16_t* p) {
  return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}
// The lower half of each word in its upper half, and the upper half alone; zeros below.
DSPARK_INLINE Words low_shorts_up(Words x) { return _mm512_slli_epi32(x, 16); }
DSPARK_INLINE Words high_shorts(Words x) {
  return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}
DSPARK_INLINE Words max_unsigned_shorts(Words a, Words b) { return _mm512_max_epu16(a, b); }
// Of each pair of them the larger, as the upper half of a word.
DSPARK_INLINE Words larger_shorts(Words x) {
  return _mm512_max_epu32(_mm512_slli_epi32(x, 16),
                          _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// 2^n for whole numbers n in [-126, 127].
DSPARK_INLINE Floats power_of_two(Floats n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
DSPARK_INLINE Floats round_even(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x where a >= b, else y; also y where a or b is NaN.
DSPARK_INLINE Floats if_ge(Floats a, Floats b, Floats x, Floats y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x);
}
// Bit i: whether a > b in lane i.
DSPARK_INLINE uint32_t bits_gt(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
DSPARK_INLINE uint32_t bits_eq(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
DSPARK_INLINE Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
DSPARK_INLINE Words to_words(Floats x) { return _mm512_cvtps_epi32(x); }  // nearest, ties to even
DSPARK_INLINE Words high_bytes(Words x) { return _mm512_srli_epi32(x, 8); }
// The lowest byte of each word.
DSPARK_INLINE void store_bytes(uint8_t* p, Words x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
DSPARK_INLINE Words sub_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
DSPARK_INLINE Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
DSPARK_INLINE Words times_128(Words x) { return _mm512_slli_epi32(x, 7); }
DSPARK_INLINE Words max_unsigned(Words a, Words b) { return _mm512_max_epu32(a, b); }
// The bits of |x|: as whole numbers they order as the values do, NaN last.
DSPARK_INLINE Words magnitude(Floats x) {
  return _mm512_and_si512(as_words(x), _mm512_set1_epi32(0x7fffffff));
}
// Values in [-127, 127], rounded to the nearest whole number (ties to even), plus 128; any byte for
// others.
DSPARK_INLINE void store_shifted_bytes(uint8_t* p, Floats x) {
  const __m512i shifted = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(shifted));
}
// Of 64 values.
DSPARK_INLINE void store_shifted_bytes(uint8_t* p, Floats a, Floats b, Floats c, Floats d) {
  const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  // Packing goes by 128-bit lanes: four values of each operand in each.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(ab, cd));
  _mm512_storeu_si512(p, _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(128))));
}

#else

struct Floats {
  __m256 a, b;
};
struct Words {
  __m256i a, b;
};

DSPARK_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DSPARK_INLINE Floats splat(float x) {
  const __m256 y = _mm256_set1_ps(x);
  return {y, y};
}
DSPARK_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DSPARK_INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
DSPARK_INLINE Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
DSPARK_INLINE Floats sub(Floats x, Floats y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
DSPARK_INLINE Floats mul(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
DSPARK_INLINE Floats div(Floats x, Floats y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
DSPARK_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
DSPARK_INLINE Floats max(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
DSPARK_INLINE __m256i load_half(const void* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
DSPARK_INLINE Words load_words(const void* p) {
  return {load_half(p), load_half(static_cast<const char*>(p) + 32)};
}
DSPARK_INLINE Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
DSPARK_INLINE Words splat_word(int32_t x) {
  const __m256i y = _mm256_set1_epi32(x);
  return {y, y};
}
DSPARK_INLINE void store_words(void* p, Words x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
DSPARK_INLINE Floats as_floats(Words x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
DSPARK_INLINE Words as_words(Floats x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}

DSPARK_INLINE __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
DSPARK_INLINE Floats load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

// The bits of x rounded to bfloat16 in the upper halves, as above.
DSPARK_INLINE __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                    _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
  return _mm256_castps_si256(y);
}
DSPARK_INLINE void store_bf16(uint16_t* p, Floats x) {
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(round_bf16(x.a), 16),
                                             _mm256_srli_epi32(round_bf16(x.b), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permute4x64_epi64(packed, 0xd8));  // packus works by 128-bit lane
}

DSPARK_INLINE Floats rounded_bf16(Floats x) {
  const auto half = [](__m256 y) __attribute__((always_inline)) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(y), upper));
  };
  return {half(x.a), half(x.b)};
}
DSPARK_INLINE Words short_magnitudes(const uint16_t* p) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  return {_mm256_and_si256(load_half(p), mask), _mm256_and_si256(load_half(p + kLanes), mask)};
}
DSPARK_INLINE Words low_shorts_up(Words x) {
  return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)};
}
DSPARK_INLINE Words high_shorts(Words x) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_and_si256(x.a, upper), _mm256_and_si256(x.b, upper)};
}
DSPARK_INLINE Words max_unsigned_shorts(Words x, Words y) {
  return {_mm256_max_epu16(x.a, y.a), _mm256_max_epu16(x.b, y.b)};
}
DSPARK_INLINE Words larger_shorts(Words x) {
  const auto half = [](__m256i y) __attribute__((always_inline)) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_max_epu32(_mm256_slli_epi32(y, 16), _mm256_and_si256(y, upper));
  };
  return {half(x.a), half(x.b)};
}

DSPARK_INLINE __m256 power_of_two_half(__m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
DSPARK_INLINE Floats power_of_two(Floats n) {
  return {power_of_two_half(n.a), power_of_two_half(n.b)};
}
DSPARK_INLINE Floats round_even(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
DSPARK_INLINE Floats if_ge(Floats p, Floats q, Floats x, Floats y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_GE_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_GE_OQ))};
}
DSPARK_INLINE uint32_t lane_bits(__m256 low, __m256 high) {
  return static_cast<uint32_t>(_mm256_movemask_ps(low) | (_mm256_movemask_ps(high) << 8));
}
DSPARK_INLINE uint32_t bits_gt(Floats p, Floats q) {
  return lane_bits(_mm256_cmp_ps(p.a, q.a, _CMP_GT_OQ), _mm256_cmp_ps(p.b, q.b, _CMP_GT_OQ));
}
DSPARK_INLINE uint32_t bits_eq(Floats p, Floats q) {
  return lane_bits(_mm256_cmp_ps(p.a, q.a, _CMP_EQ_OQ), _mm256_cmp_ps(p.b, q.b, _CMP_EQ_OQ));
}
DSPARK_INLINE Floats to_floats(Words x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
DSPARK_INLINE Words to_words(Floats x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
DSPARK_INLINE Words high_bytes(Words x) {
  return {_mm256_srli_epi32(x.a, 8), _mm256_srli_epi32(x.b, 8)};
}
DSPARK_INLINE void store_bytes(uint8_t* p, Words x) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i halves = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256(x.a, byte), _mm256_and_si256(x.b, byte)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(halves),
                                    _mm256_extracti128_si256(halves, 1)));
}
DSPARK_INLINE Words sub_words(Words x, Words y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
DSPARK_INLINE Words add_words(Words x, Words y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
DSPARK_INLINE Words times_128(Words x) {
  return {_mm256_slli_epi32(x.a, 7), _mm256_slli_epi32(x.b, 7)};
}
DSPARK_INLINE Words max_unsigned(Words x, Words y) {
  return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)};
}
DSPARK_INLINE Words magnitude(Floats x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask),
          _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
DSPARK_INLINE void store_shifted_bytes(uint8_t* p, Floats x) {
  const __m256i shift = _mm256_set1_epi32(128);
  const __m256i a = _mm256_add_epi32(_mm256_cvtps_epi32(x.a), shift);
  const __m256i b = _mm256_add_epi32(_mm256_cvtps_epi32(x.b), shift);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves),
                                         _mm256_extracti128_si256(halves, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
DSPARK_INLINE void store_shifted_bytes(uint8_t* p, Floats a, Floats b, Floats c, Floats d) {
  store_shifted_bytes(p, a);
  store_shifted_bytes(p + kLanes, b);
  store_shifted_bytes(p + 2 * kLanes, c);
  store_shifted_bytes(p + 3 * kLanes, d);
}

#endif

// Lane by lane in one order, so that the sum does not depend on the instruction set.
#if defined(__AVX512F__)
DSPARK_INLINE float sum_lanes(Floats x) {
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0x4e));
  x = _mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0xb1));
  return _mm512_cvtss_f32(x);
}
// Of two equal lanes (0 and -0) and beside a NaN, the first counts.
DSPARK_INLINE float max_lanes(Floats x) {
  x = _mm512_max_ps(_mm512_shuffle_f32x4(x, x, 0x4e), x);
  x = _mm512_max_ps(_mm512_shuffle_f32x4(x, x, 0xb1), x);
  x = _mm512_max_ps(_mm512_shuffle_ps(x, x, 0x4e), x);
  x = _mm512_max_ps(_mm512_shuffle_ps(x, x, 0xb1), x);
  return _mm512_cvtss_f32(x);
}
DSPARK_INLINE uint32_t max_lanes(Words x) { return _mm512_reduce_max_epu32(x); }  // unsigned
#else
DSPARK_INLINE float sum_lanes(Floats x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 0xb1)));
}
DSPARK_INLINE float max_lanes(Floats x) {
  const __m256 eight = _mm256_max_ps(x.b, x.a);
  __m128 y = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  y = _mm_max_ps(_mm_movehl_ps(y, y), y);
  return _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps(y, y, 0xb1), y));
}
DSPARK_INLINE uint32_t max_lanes(Words x) {
  const __m256i eight = _mm256_max_epu32(x.a, x.b);
  __m128i y = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(y));
}
#endif

// e^x for x <= 88, relative error about 1e-7; exactly 1 at 0, exactly 0 below -87, NaN of NaN.
// Cody-Waite reduction to |r| <= ln 2 / 2, then the Taylor polynomial of degree 7.
DSPARK_INLINE Floats exp(Floats x) {
  const Floats lowest = splat(-87.0f);
  const Floats y = max(lowest, x);
  const Floats n = round_even(mul(y, splat(1.44269504088896341f)));
  Floats r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  p = mul(p, power_of_two(n));
  return if_ge(lowest, x, zero(), p);
}

// 32 values in a row.
DSPARK_INLINE void store_two(float* p, Floats x, Floats y) {
  store(p, x);
  store(p + kLanes, y);
}
#if defined(__AVX512BF16__)
// Rounds as `store_bf16` does, where NaN only stays NaN.
DSPARK_INLINE Words two_as_bf16(Floats x, Floats y) {
  constexpr int kDenormal = 0x20;  // the instruction takes them for zeros
  if (__builtin_expect(
          _mm512_fpclass_ps_mask(x, kDenormal) | _mm512_fpclass_ps_mask(y, kDenormal), 0)) {
    uint16_t values[2 * kLanes];
    store_bf16(values, x);
    store_bf16(values + kLanes, y);
    return load_words(values);
  }
  return reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(y, x));
}
DSPARK_INLINE void store_two(uint16_t* p, Floats x, Floats y) {
  store_words(p, two_as_bf16(x, y));
}
#else
DSPARK_INLINE void store_two(uint16_t* p, Floats x, Floats y) {
  store_bf16(p, x);
  store_bf16(p + kLanes, y);
}
#endif

// Values of one storage type as float32.
DSPARK_INLINE Floats load(const uint16_t* p) { return load_bf16(p); }
DSPARK_INLINE void store(uint16_t* p, Floats x) { store_bf16(p, x); }

// The first `count` < 16 values, zeros after them; never reads or writes past them.
template <class T>
DSPARK_INLINE Floats load_some(const T* p, int64_t count) {
  T values[kLanes] = {};
  memcpy(values, p, static_cast<size_t>(count) * sizeof(T));
  return load(values);
}
template <class T>
DSPARK_INLINE void store_some(T* p, Floats x, int64_t count) {
  T values[kLanes];
  store(values, x);
  memcpy(p, values, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace DSPARK_ISA
}  // namespace dspark
