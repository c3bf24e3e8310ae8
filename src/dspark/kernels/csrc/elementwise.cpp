// Row by row: normalisation, gated activation, rotation. Rows never meet. And plain reading.
#include "kernels.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

template <class T>
DSPARK_INLINE Floats load_up_to(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load_some(p, count);
}
template <class T>
DSPARK_INLINE void store_up_to(T* p, Floats x, int64_t count) {
  if (count >= kLanes) store(p, x);
  else store_some(p, x, count);
}

// x rounded to the storage type and back.
template <class T>
DSPARK_INLINE Floats rounded(Floats x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  else return rounded_bf16(x);
}

// out[i] = value(i, count) for sixteen values from i on, of which `count` are wanted.
template <class T, class F>
DSPARK_INLINE void fill(T* out, int64_t width, const F& value) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes)
    store_two(out + i, value(i, kLanes), value(i + kLanes, kLanes));
  for (; i < width; i += kLanes) store_up_to(out + i, value(i, width - i), width - i);
}

// The normalised value is rounded to the storage type before the product, as Llama does.
template <class T>
void norm(const T* x, const T* weight, T* out, int64_t width, float eps) {
  Floats squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Floats v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < width) {
    const Floats v = load_some(x + i, width - i);
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const Floats factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  fill(out, width, [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    const Floats v = rounded<T>(mul(load_up_to(x + at, count), factor));
    return mul(load_up_to(weight + at, count), v);
  });
}

// silu(gate) * up with silu rounded to the storage type, as two operators would.
template <class T>
void gated(const T* gates, const T* up, T* out, int64_t width) {
  fill(out, width, [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    const Floats gate = load_up_to(gates + at, count);
    const Floats minus = sub(zero(), gate);
    const Floats bounded = if_ge(minus, splat(88.0f), splat(88.0f), minus);  // e^88 is finite
    const Floats silu = rounded<T>(div(gate, add(splat(1.0f), exp(bounded))));
    return mul(silu, load_up_to(up + at, count));
  });
}

template <class T, class Table>
void rotate_row(T* x, const Table* cos, const Table* sin, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Floats a = load_up_to(x + i, left);
    const Floats b = load_up_to(x + half + i, left);
    const Floats new_a = sub(mul(a, load_up_to(cos + i, left)), mul(b, load_up_to(sin + i, left)));
    const Floats new_b =
        add(mul(b, load_up_to(cos + half + i, left)), mul(a, load_up_to(sin + half + i, left)));
    store_up_to(x + i, new_a, left);
    store_up_to(x + half + i, new_b, left);
  }
}

template <class T>
void rotate_by(T* x, Type table_type, const char* cos, const char* sin, int64_t rotary_dim) {
  if (table_type == Type::kBFloat16)
    rotate_row(x, reinterpret_cast<const uint16_t*>(cos), reinterpret_cast<const uint16_t*>(sin),
               rotary_dim);
  else
    rotate_row(x, reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin),
               rotary_dim);
}

}  // namespace

void rms_norm(Type type, const char* x, const char* weight, char* out, int64_t width, float eps) {
  if (type == Type::kBFloat16)
    norm(reinterpret_cast<const uint16_t*>(x), reinterpret_cast<const uint16_t*>(weight),
         reinterpret_cast<uint16_t*>(out), width, eps);
  else
    norm(reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(weight),
         reinterpret_cast<float*>(out), width, eps);
}

void silu_mul(Type type, const char* gate, const char* up, char* out, int64_t width) {
  if (type == Type::kBFloat16)
    gated(reinterpret_cast<const uint16_t*>(gate), reinterpret_cast<const uint16_t*>(up),
          reinterpret_cast<uint16_t*>(out), width);
  else
    gated(reinterpret_cast<const float*>(gate), reinterpret_cast<const float*>(up),
          reinterpret_cast<float*>(out), width);
}

void rotate(Type type, char* x, Type table_type, const char* cos, const char* sin,
            int64_t rotary_dim) {
  if (type == Type::kBFloat16)
    rotate_by(reinterpret_cast<uint16_t*>(x), table_type, cos, sin, rotary_dim);
  else
    rotate_by(reinterpret_cast<float*>(x), table_type, cos, sin, rotary_dim);
}

// Of memory front to back, `size` being a multiple of 64 bytes: as fast as it can be read.
uint32_t sum_words(const char* x, int64_t size) {
  constexpr int64_t kPrefetch = 8192, kStep = 64, kSums = 4;
  Words sums[kSums] = {zero_words(), zero_words(), zero_words(), zero_words()};
  int64_t i = 0;
  for (; i + kSums * kStep <= size; i += kSums * kStep)
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSums; ++j) {
      _mm_prefetch(x + i + j * kStep + kPrefetch, _MM_HINT_T0);
      sums[j] = add_words(sums[j], load_words(x + i + j * kStep));
    }
  for (; i < size; i += kStep) sums[0] = add_words(sums[0], load_words(x + i));
  for (int64_t j = 1; j < kSums; ++j) sums[0] = add_words(sums[0], sums[j]);
  uint32_t lanes[kLanes], total = 0;
  store_words(lanes, sums[0]);
  for (const uint32_t lane : lanes) total += lane;
  return total;
}

}  // namespace DSPARK_ISA
}  // namespace dspark
