// The counter-based noise of dspark.algorithms.noise: keys and uniforms of one row.
#pragma once

#include <stdint.h>

namespace dspark {

// The streams that are used here, numbered as there.
enum class Stream : uint64_t { kToken = 1, kDraft = 2, kAccept = 3, kTarget = 4, kRound = 5 };

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// `row_keys`.
inline uint64_t noise_key(int64_t seed, int64_t position, Stream stream) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t z = mix64(static_cast<uint64_t>(seed) + kGolden * static_cast<uint64_t>(stream));
  return mix64(z + (static_cast<uint64_t>(position) + 1) * kGolden);
}

// `uniform` of a key without tokens.
inline double noise_uniform(uint64_t key) {
  uint32_t x = static_cast<uint32_t>(key);
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x += static_cast<uint32_t>(key >> 32);
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return (static_cast<double>(static_cast<int32_t>(x)) + 2147483648.5) * 0x1p-32;
}

// `RoundNoise.uniforms` of one slot.
inline double round_uniform(int64_t seed, int64_t round, int64_t position, Stream stream) {
  const int64_t own = static_cast<int64_t>(noise_key(seed, round, Stream::kRound));
  return noise_uniform(noise_key(own, position, stream));
}

}  // namespace dspark
