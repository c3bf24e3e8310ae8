// Parts of rows of scores: the largest, draws by counter-based Gumbel noise, probabilities.
//
// A row may be cut between threads: what is summed is summed in blocks of kBlock columns, each in
// one fixed order, so that no result depends on the cut.
#include <math.h>

#include "kernels.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {
namespace {

constexpr uint32_t kAllLanes = 0xffff;

template <class T>
DSPARK_INLINE Floats load_or_lowest(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float values[kLanes];
  store(values, load_some(p, count));
  for (int64_t i = count; i < kLanes; ++i) values[i] = -INFINITY;
  return load(values);
}

template <class T>
Best best_of(const T* x, int64_t width) {
  Floats highest = splat(-INFINITY);
  uint32_t ordered = kAllLanes;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats value = load_or_lowest(x + i, width - i);
    highest = max(value, highest);  // in this order NaN loses
    ordered &= bits_eq(value, value);
  }
  const float largest = max_lanes(highest);
  Best best = {largest, 0, ordered != kAllLanes};
  for (int64_t i = 0; i < width; i += kLanes) {
    const uint32_t bits = bits_eq(load_or_lowest(x + i, width - i), splat(largest));
    if (bits != 0) {
      best.column = i + __builtin_ctz(bits);
      break;
    }
  }
  return best;
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

// (x - shift) / temperature: what PyTorch computes, operation by operation.
template <class T>
DSPARK_INLINE Floats scores_at(const Scores& a, int64_t i, int64_t count) {
  const T* x = reinterpret_cast<const T*>(a.x);
  const Floats value = sub(load_or_lowest(x + i, count), splat(a.shift));
  return a.temperature == 1.0f ? value : div(value, splat(a.temperature));
}

// Two logarithms a token would cost more than the model's last layer, so most are never taken:
// g = -log(-log u) <= -log(1 - u), and log2(m) of a float m is at least its bits read as a number
// with 23 fractional bits, less 127. Only tokens whose bound passes the best so far are computed.
template <class T>
Draw draw_shared(const Scores& a, int64_t begin, int64_t end, uint64_t key,
                 const int64_t* tokens) {
  const uint32_t low = static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  constexpr float kLn2 = 0.693147181f;
  const Floats offset = splat((31.0f + 127.0f) * kLn2 + 1e-3f);  // and room for rounding
  const Floats slope = splat(-kLn2 * 0x1p-23f);
  Draw best = {-INFINITY, begin};
  float threshold = -INFINITY;
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t count = end - i < kLanes ? end - i : kLanes;
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
    const Floats value = scores_at<T>(a, i, count);
    const Floats bound = add(value, fma(to_floats(load_words(rest)), slope, offset));
    uint32_t candidates = bits_gt(bound, splat(threshold));
    if (candidates == 0) continue;
    float values[kLanes];
    store(values, value);
    while (candidates != 0) {
      const int j = __builtin_ctz(candidates);
      candidates &= candidates - 1;
      const double score = static_cast<double>(values[j]) + gumbel(bits[j]);
      if (score > best.score) {
        best = {score, i + j};
        threshold = static_cast<float>(score) - 1e-6f * fabsf(static_cast<float>(score));
      }
    }
  }
  return best;
}

template <class T>
float exponentials(const Scores& a, int64_t begin, int64_t end, float* out) {
  Floats sum = zero();
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t count = end - i;
    const Floats value = exp(scores_at<T>(a, i, count));
    sum = add(sum, value);
    if (count >= kLanes) store(out + i, value);
    else store_some(out + i, value, count);
  }
  return sum_lanes(sum);
}

template <class T>
void scores_of(const Scores& a, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats value = scores_at<T>(a, i, width - i);
    if (width - i >= kLanes) store(out + i, value);
    else store_some(out + i, value, width - i);
  }
}

template <class T>
void add_into(const T* from, T* to, int64_t width) {
  const auto sum = [&](int64_t i) __attribute__((always_inline)) {
    return add(load(from + i), load(to + i));
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) store_two(to + i, sum(i), sum(i + kLanes));
  for (; i + kLanes <= width; i += kLanes) store(to + i, sum(i));
  if (i < width)
    store_some(to + i, add(load_some(from + i, width - i), load_some(to + i, width - i)),
               width - i);
}

template <class T>
float dot_with(const T* x, const float* weights, int64_t width) {
  Floats sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) sum = fma(load(x + i), load(weights + i), sum);
  if (i < width)
    sum = fma(load_some(x + i, width - i), load_some(weights + i, width - i), sum);
  return sum_lanes(sum);
}

}  // namespace

Best best(Type type, const char* x, int64_t width) {
  return type == Type::kBFloat16 ? best_of(reinterpret_cast<const uint16_t*>(x), width)
                                 : best_of(reinterpret_cast<const float*>(x), width);
}

Draw shared_draw(const Scores& a, int64_t begin, int64_t end, uint64_t key,
                 const int64_t* tokens) {
  return a.type == Type::kBFloat16 ? draw_shared<uint16_t>(a, begin, end, key, tokens)
                                   : draw_shared<float>(a, begin, end, key, tokens);
}

float exponential_block(const Scores& a, int64_t begin, int64_t end, float* out) {
  return a.type == Type::kBFloat16 ? exponentials<uint16_t>(a, begin, end, out)
                                   : exponentials<float>(a, begin, end, out);
}

void divide(float* x, int64_t width, float by) {
  const Floats divisor = splat(by);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(x + i, div(load(x + i), divisor));
  if (i < width) store_some(x + i, div(load_some(x + i, width - i), divisor), width - i);
}

void clamp_at_zero(float* x, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(x + i, max(load(x + i), zero()));
  if (i < width) store_some(x + i, max(load_some(x + i, width - i), zero()), width - i);
}

// Sixteen sums, each over every sixteenth column, then those from first to last.
double block_sum(const float* x, int64_t width) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(x[i + j]);
  for (int j = 0; i + j < width; ++j) lanes[j] += static_cast<double>(x[i + j]);
  double sum = 0.0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

void score_row(const Scores& a, int64_t width, float* out) {
  if (a.type == Type::kBFloat16) scores_of<uint16_t>(a, width, out);
  else scores_of<float>(a, width, out);
}

int64_t count_from(const float* x, int64_t width, float floor) {
  int64_t count = 0;
  for (int64_t i = 0; i < width; ++i) count += x[i] >= floor ? 1 : 0;
  return count;
}

void keep_from(float* x, int64_t width, float floor) {
  for (int64_t i = 0; i < width; ++i) x[i] = x[i] >= floor ? x[i] : -INFINITY;
}

// Those that are not below the floor, in order.
int64_t gather_from(const float* x, int64_t width, float floor, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t own = width - i < kLanes ? width - i : kLanes;
    uint32_t kept = ~bits_gt(splat(floor), load_or_lowest(x + i, own)) & ((1u << own) - 1);
    for (; kept != 0; kept &= kept - 1) out[count++] = x[i + __builtin_ctz(kept)];
  }
  return count;
}

// Part i has every column i, i + num_parts, .. below `width`, a multiple of it.
void part_maxima(const float* x, int64_t width, float* maxima, int64_t num_parts) {
  for (int64_t i = 0; i < num_parts; ++i) maxima[i] = x[i];
  for (int64_t begin = num_parts; begin < width; begin += num_parts)
    for (int64_t i = 0; i < num_parts; ++i)
      maxima[i] = x[begin + i] > maxima[i] ? x[begin + i] : maxima[i];
}

void add_row(Type type, const char* from, char* to, int64_t width) {
  if (type == Type::kBFloat16)
    add_into(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<uint16_t*>(to), width);
  else
    add_into(reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to), width);
}

float dot(Type type, const char* x, const float* weights, int64_t width) {
  return type == Type::kBFloat16 ? dot_with(reinterpret_cast<const uint16_t*>(x), weights, width)
                                 : dot_with(reinterpret_cast<const float*>(x), weights, width);
}

}  // namespace DSPARK_ISA
}  // namespace dspark
