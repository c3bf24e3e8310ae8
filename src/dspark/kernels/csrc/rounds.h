// What a round asks of each of its requests, and draws from rows of probabilities.
#pragma once

#include <algorithm>
#include <vector>

#include "filtering.h"
#include "host.h"
#include "noise.h"

namespace dspark {

// How a request's tokens are drawn, numbered as dspark.kernels.rounds.DrawKind.
enum class DrawKind : int64_t { kGreedy = 0, kShared = 1, kMaximal = 2 };

// Rows of the table of dspark.kernels.rounds.RoundTable, one column for each request.
struct Rounds {
  static constexpr int64_t kCounters = 6, kOptions = 3;

  const int64_t* kinds;
  const int64_t* seeds;
  const int64_t* positions;  // of the first drafted token
  const int64_t* rounds;     // that the request has had before
  const int64_t* anchors;
  const int64_t* top_ks;
  const double* temperatures;
  const double* top_ps;
  const double* min_ps;
  int64_t size;

  // Of rows that lie `counter_stride` and `option_stride` values apart.
  static Rounds of(const int64_t* counters, int64_t counter_stride, const double* options,
                   int64_t option_stride, int64_t size) {
    const auto counter = [&](int64_t row) { return counters + row * counter_stride; };
    return {counter(0), counter(1), counter(2), counter(3), counter(4), counter(5),
            options,    options + option_stride, options + 2 * option_stride, size};
  }

  DrawKind kind(int64_t r) const { return static_cast<DrawKind>(kinds[r]); }
  float temperature(int64_t r) const {
    return kind(r) == DrawKind::kGreedy ? 1.0f : static_cast<float>(temperatures[r]);
  }
  Filter filter(int64_t r) const {
    if (kind(r) == DrawKind::kGreedy) return {};
    return {top_ks[r], top_ps[r], min_ps[r]};
  }
  uint64_t shared_key(int64_t r, int64_t slot) const {
    return noise_key(seeds[r], positions[r] + slot, Stream::kToken);
  }
  double uniform(int64_t r, int64_t slot, Stream stream) const {
    return round_uniform(seeds[r], rounds[r], positions[r] + slot, stream);
  }
  bool has(DrawKind wanted) const {
    for (int64_t r = 0; r < size; ++r)
      if (kind(r) == wanted) return true;
    return false;
  }
};

// The tensors of a RoundTable, whose rows may lie apart.
inline Rounds rounds_of(const Tensor& counters, const Tensor& options) {
  TORCH_CHECK(options.dim() == 2 && options.size(0) == Rounds::kOptions &&
                  options.scalar_type() == at::kDouble,
              "options must be ", Rounds::kOptions, " rows of float64, got ", options.sizes());
  const int64_t size = options.size(1);
  TORCH_CHECK(counters.dim() == 2 && counters.size(0) == Rounds::kCounters &&
                  counters.size(1) == size && counters.scalar_type() == at::kLong &&
                  (size <= 1 || (counters.stride(1) == 1 && options.stride(1) == 1)),
              "counters must be rows of ", size, " values, got ", counters.sizes());
  return Rounds::of(counters.const_data_ptr<int64_t>(), counters.stride(0),
                    options.const_data_ptr<double>(), options.stride(0), size);
}

// The same from lists, row after row.
inline Rounds rounds_of(const std::vector<int64_t>& counters, const std::vector<double>& options) {
  const int64_t size = static_cast<int64_t>(options.size()) / Rounds::kOptions;
  TORCH_CHECK(static_cast<int64_t>(options.size()) == Rounds::kOptions * size &&
                  static_cast<int64_t>(counters.size()) == Rounds::kCounters * size,
              "expected ", Rounds::kCounters, " counters and ", Rounds::kOptions,
              " options for each of ", size, " requests");
  return Rounds::of(counters.data(), size, options.data(), size, size);
}

inline int64_t num_blocks(int64_t width) { return ceil_div(width, kBlock); }

inline double sum_in_order(const double* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// The column of weights [0, width) at which the running sum passes u times their total; `sums` are
// the block sums. A weight of zero is never drawn. It is draw_categorical of
// dspark.algorithms.sampling.
inline int64_t draw_column(const float* weights, int64_t width, const double* sums, double u) {
  const int64_t count = num_blocks(width);
  const double threshold = u * sum_in_order(sums, count);
  int64_t block = 0;
  double before = 0.0;
  while (block + 1 < count && !(before + sums[block] > threshold)) before += sums[block++];
  const double rest = threshold - before;
  const int64_t begin = block * kBlock, end = std::min(begin + kBlock, width);
  double running = 0.0;
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    running += static_cast<double>(weights[i]);
    if (running > rest) return i;
    if (weights[i] > 0.0f) last = i;
  }
  return last;  // the block's sum passes the threshold, its running sum misses it by a rounding
}

// Probabilities of a row of scores: exponentials, then each over their total.
inline float exponentials(const Kernels& k, const Scores& row, int64_t width, float* out) {
  double total = 0.0;
  for (int64_t begin = 0; begin < width; begin += kBlock)
    total += static_cast<double>(
        k.exponential_block(row, begin, std::min(begin + kBlock, width), out));
  return static_cast<float>(total);
}

inline void block_sums(const Kernels& k, const float* weights, int64_t width, double* sums) {
  for (int64_t begin = 0; begin < width; begin += kBlock)
    sums[begin / kBlock] =
        k.block_sum(weights + begin, std::min(kBlock, width - begin));
}

}  // namespace dspark
