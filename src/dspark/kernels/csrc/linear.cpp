// Products with packed weights. Each (token, output) sum runs over the inputs from first to last
// in one accumulator, whatever the tile shape: its bits depend on the token and the weights only.
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

template <class T>
void quantize(const T* x, int64_t width, uint8_t* out, int64_t padded, float* scale) {
  const int64_t whole = width / kLanes * kLanes;
  Words bits = zero_words();
  for (int64_t i = 0; i < whole; i += kLanes) bits = max_unsigned(bits, magnitude(load(x + i)));
  if (whole < width)
    bits = max_unsigned(bits, magnitude(load_some(x + whole, width - whole)));
  const uint32_t largest_bits = max_lanes(bits);
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
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
