// One index per row of scores: the largest, or the largest after counter-based Gumbel noise.
#include <math.h>

#include "kernels.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

template <class T>
DSPARK_INLINE Floats load_or_lowest(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float values[kLanes];
  store(values, load_some(p, count));
  for (int64_t i = count; i < kLanes; ++i) values[i] = -INFINITY;
  return load(values);
}

template <class T>
int64_t largest(const T* x, int64_t width) {
  Floats highest = splat(-INFINITY);
  for (int64_t i = 0; i < width; i += kLanes)
    highest = max(load_or_lowest(x + i, width - i), highest);  // in this order NaN loses
  const Floats value = splat(max_lanes(highest));
  for (int64_t i = 0; i < width; i += kLanes) {
    const uint32_t bits = bits_eq(load_or_lowest(x + i, width - i), value);
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  return 0;
}

// `random_bits` of dspark.algorithms.noise.
DSPARK_INLINE uint32_t noise_bits(uint32_t token, uint32_t low, uint32_t high) {
  uint32_t x = token + low;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x += high;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

// `gumbel` of dspark.algorithms.noise: its bits read as a signed number.
double gumbel(uint32_t bits) {
  const double u = (static_cast<double>(static_cast<int32_t>(bits)) + 2147483648.5) * 0x1p-32;
  return -log(-log(u));
}

}  // namespace

int64_t argmax(Type type, const char* x, int64_t width) {
  return type == Type::kBFloat16 ? largest(reinterpret_cast<const uint16_t*>(x), width)
                                 : largest(reinterpret_cast<const float*>(x), width);
}

// Two logarithms a token would cost more than the model's last layer, so most are never taken:
// g = -log(-log u) <= -log(1 - u), and log2(m) of a float m is at least its bits read as a number
// with 23 fractional bits, less 127. Only tokens whose bound passes the best so far are computed.
int64_t gumbel_argmax(const float* scores, int64_t width, uint64_t key, const int64_t* tokens) {
  const uint32_t low = static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  constexpr float kLn2 = 0.693147181f;
  const Floats offset = splat((31.0f + 127.0f) * kLn2 + 1e-3f);  // and room for rounding
  const Floats slope = splat(-kLn2 * 0x1p-23f);
  double best = -INFINITY;
  float threshold = -INFINITY;
  int64_t winner = 0;
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i < kLanes ? width - i : kLanes;
    uint32_t ids[kLanes] = {};
    if (tokens == nullptr)
      for (int j = 0; j < kLanes; ++j) ids[j] = static_cast<uint32_t>(i + j);
    else
      for (int j = 0; j < count; ++j) ids[j] = static_cast<uint32_t>(tokens[i + j]);
    uint32_t bits[kLanes];
    float rest[kLanes];  // (1 - u) * 2^31, rounded down to a whole number
    for (int j = 0; j < kLanes; ++j) {
      bits[j] = noise_bits(ids[j], low, high);
      rest[j] = static_cast<float>(static_cast<int32_t>((0x7fffffffu - bits[j]) >> 1));
    }
    const Floats value = load_or_lowest(scores + i, count);
    const Floats bound = add(value, fma(to_floats(load_words(rest)), slope, offset));
    uint32_t candidates = bits_gt(bound, splat(threshold));
    while (candidates != 0) {
      const int j = __builtin_ctz(candidates);
      candidates &= candidates - 1;
      const double score = static_cast<double>(scores[i + j]) + gumbel(bits[j]);
      if (score > best) {
        best = score;
        winner = i + j;
        threshold = static_cast<float>(best) - 1e-6f * fabsf(static_cast<float>(best));
      }
    }
  }
  return winner;
}

}  // namespace DSPARK_ISA
}  // namespace dspark
