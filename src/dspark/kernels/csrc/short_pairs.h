// Products of bytes without VNNI. The 8-bit instruction saturates, so bytes are widened to 16 bits:
// first and third of each word, second and fourth. A product then adds up two pairs, exactly.
#pragma once

#include "vector.h"

#if !defined(__AVX512VNNI__)

namespace dspark {
namespace DSPARK_ISA {

#if defined(__AVX512F__)
using Repeated = __m512i;  // one word in all lanes

DSPARK_INLINE Words low_bytes(Words x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
DSPARK_INLINE Words upper_bytes(Words x) { return _mm512_srli_epi16(x, 8); }
DSPARK_INLINE Words signed_low_bytes(Words x) {
  return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
}
DSPARK_INLINE Words signed_upper_bytes(Words x) { return _mm512_srai_epi16(x, 8); }
DSPARK_INLINE Words add_shorts(Words x, Words y) { return _mm512_add_epi16(x, y); }
DSPARK_INLINE Words sums_of_shorts(Words x) {
  return _mm512_madd_epi16(x, _mm512_set1_epi16(1));
}
// x = high 2^15 + low, with low in [0, 2^15).
DSPARK_INLINE Words high_part(Words x) { return _mm512_srai_epi32(x, 15); }
DSPARK_INLINE Words low_part(Words x) {
  return _mm512_and_si512(x, _mm512_set1_epi32((1 << 15) - 1));
}
// Values in [-2^15, 2^15).
DSPARK_INLINE __m256i words_as_shorts(Words x) { return _mm512_cvtepi32_epi16(x); }

// sum += both products of each pair. Not the intrinsics: GCC 12 adds up products of two pairs
// first, and then has more sums than registers.
DSPARK_INLINE Words add_pairs(Words sum, Words x, Repeated pair) {
  __m512i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
      : "+v"(sum), "=&v"(products)
      : "v"(x), "v"(pair));
  return sum;
}
#else
using Repeated = __m256i;

DSPARK_INLINE Words low_bytes(Words x) {
  const __m256i low = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
DSPARK_INLINE Words upper_bytes(Words x) {
  return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)};
}
DSPARK_INLINE Words signed_low_bytes(Words x) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8),
          _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
}
DSPARK_INLINE Words signed_upper_bytes(Words x) {
  return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)};
}
DSPARK_INLINE Words add_shorts(Words x, Words y) {
  return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
}
DSPARK_INLINE Words sums_of_shorts(Words x) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(x.a, one), _mm256_madd_epi16(x.b, one)};
}
DSPARK_INLINE Words high_part(Words x) {
  return {_mm256_srai_epi32(x.a, 15), _mm256_srai_epi32(x.b, 15)};
}
DSPARK_INLINE Words low_part(Words x) {
  const __m256i mask = _mm256_set1_epi32((1 << 15) - 1);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
DSPARK_INLINE __m256i words_as_shorts(Words x) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
}

DSPARK_INLINE __m256i add_half_pairs(__m256i sum, __m256i x, Repeated pair) {
  __m256i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(products)
      : "x"(pair), "x"(x));
  return sum;
}
DSPARK_INLINE Words add_pairs(Words sum, Words x, Repeated pair) {
  return {add_half_pairs(sum.a, x.a, pair), add_half_pairs(sum.b, x.b, pair)};
}
#endif

}  // namespace DSPARK_ISA
}  // namespace dspark

#endif
