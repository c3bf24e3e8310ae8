// Products with packed weights. Each (token, output) sum runs over the inputs from first to last
// in one accumulator, whatever the tile shape: its bits depend on the token and the weights only.
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

// The bits of the largest magnitude, NaN being the largest of all.
DSPARK_INLINE uint32_t largest_of(const float* x, int64_t width) {
  const int64_t whole = width / kLanes * kLanes;
  Words bits = zero_words();
  for (int64_t i = 0; i < whole; i += kLanes) bits = max_unsigned(bits, magnitude(load(x + i)));
  if (whole < width)
    bits = max_unsigned(bits, magnitude(load_some(x + whole, width - whole)));
  return max_lanes(bits);
}
DSPARK_INLINE uint32_t largest_of(const uint16_t* x, int64_t width) {
  const int64_t whole = width / (2 * kLanes) * (2 * kLanes);
  Words shorts = zero_words();
  for (int64_t i = 0; i < whole; i += 2 * kLanes)
    shorts = max_unsigned_shorts(shorts, short_magnitudes(x + i));
  Words bits = larger_shorts(shorts);
  for (int64_t i = whole; i < width; i += kLanes)
    bits = max_unsigned(
        bits, magnitude(width - i >= kLanes ? load(x + i) : load_some(x + i, width - i)));
  return max_lanes(bits);
}

template <class T>
void quantize(const T* x, int64_t width, uint8_t* out, int64_t padded, float* scale) {
  const uint32_t largest_bits = largest_of(x, width);
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  const float quotient = 127.0f / largest;  // infinite for zeros and what is next to them
  const Floats inverse = splat(quotient < __builtin_inff() ? quotient : 0.0f);
  *scale = largest / 127.0f;
  const auto at = [&](int64_t i) __attribute__((always_inline)) {
    return mul(load(x + i), inverse);
  };
  // A value that is not finite may become any byte: the scale is not finite either.
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    store_shifted_bytes(out + i, at(i), at(i + kLanes), at(i + 2 * kLanes), at(i + 3 * kLanes));
  for (; i + kLanes <= width; i += kLanes) store_shifted_bytes(out + i, at(i));
  if (i < width) {
    uint8_t bytes[kLanes];
    store_shifted_bytes(bytes, mul(load_some(x + i, width - i), inverse));
    memcpy(out + i, bytes, static_cast<size_t>(width - i));
  }
  for (i = width; i < padded; ++i) out[i] = 128;
}

}  // namespace

void linear(const Linear& a, int64_t panel_begin, int64_t panel_end) {
#if defined(__AMX_TILE__)
  // The shape of the weight alone decides: a layer never mixes two orders of summation.
  if (a.num_units % kTileUnits == 0 && a.weights == Weights::kBFloat16)
    return tile_product<false>(a, panel_begin, panel_end);
  if (a.num_units % kTileUnits == 0 && a.weights == Weights::kInt8)
    return tile_product<true>(a, panel_begin, panel_end);
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
