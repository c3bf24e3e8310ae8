// The search of a plan over a block of many requests: `torch.ops.dspark.survivals`,
// `best_prefixes` and `priced_prefixes`. Their references are `algorithms.calibration` and
// `algorithms.prefix_scheduler`; on the same survivals both find the same lengths, ties included.
//
// It is a few thousand numbers between two passes: one thread, no table that outlives a call.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "host.h"

namespace dspark {
namespace {

// Survivals of a block as a search sees them: beyond a cap nothing survives.
struct Block {
  const float* survivals;
  int64_t num_requests;
  int64_t size;
  std::vector<int64_t> caps;

  float at(int64_t request, int64_t slot) const { return survivals[request * size + slot]; }
};

Block block_of(const Tensor& survivals, const Tensor& caps) {
  TORCH_CHECK(survivals.dim() == 2 && survivals.scalar_type() == at::kFloat &&
                  survivals.is_contiguous(),
              "survivals must be contiguous float32 values [requests, positions]");
  Block block = {survivals.const_data_ptr<float>(), survivals.size(0), survivals.size(1), {}};
  TORCH_CHECK(caps.scalar_type() == at::kByte && caps.numel() == block.num_requests,
              "caps must be a byte for each of the ", block.num_requests, " requests");
  const uint8_t* cap = contiguous_data<uint8_t>(caps, block.num_requests, "caps");
  block.caps.resize(static_cast<size_t>(block.num_requests));
  for (int64_t r = 0; r < block.num_requests; ++r)
    block.caps[r] = std::min<int64_t>(cap[r], block.size);
  return block;
}

// Falling. Bits of positive floats order as the floats do, and those of a chance are below 2^30:
// three passes of ten bits each, counted together.
void sort_falling(std::vector<uint32_t>& keys) {
  constexpr int kBits = 10, kPasses = 3;
  constexpr uint32_t kLast = (1u << kBits) - 1;
  std::vector<uint32_t> counts(kPasses << kBits, 0), other(keys.size());
  for (const uint32_t key : keys)
    for (int pass = 0; pass < kPasses; ++pass)
      ++counts[(pass << kBits) + (kLast - (key >> (pass * kBits) & kLast))];
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t* places = counts.data() + (pass << kBits);
    uint32_t place = 0;
    for (uint32_t digit = 0; digit <= kLast; ++digit) {
      const uint32_t count = places[digit];
      places[digit] = place;
      place += count;
    }
    for (const uint32_t key : keys) other[places[kLast - (key >> (pass * kBits) & kLast)]++] = key;
    keys.swap(other);
  }
}

float value_of(uint32_t key) {
  float value;
  memcpy(&value, &key, sizeof(value));
  return value;
}

// The `budget` best tokens as lengths, the last of which survives with this chance: of equals the
// first ones stay, by position, then request.
std::vector<int64_t> lengths_down_to(const Block& block, float last, int64_t budget) {
  std::vector<int64_t> lengths(static_cast<size_t>(block.num_requests), 0);
  int64_t surplus = -budget;
  for (int64_t r = 0; r < block.num_requests; ++r) {
    for (int64_t k = 0; k < block.caps[r]; ++k) lengths[r] += block.at(r, k) >= last;
    surplus += lengths[r];
  }
  for (int64_t k = block.size - 1; k >= 0 && surplus > 0; --k)
    for (int64_t r = block.num_requests - 1; r >= 0 && surplus > 0; --r)
      if (k < block.caps[r] && block.at(r, k) == last) {
        --lengths[r];
        --surplus;
      }
  return lengths;
}

// Beyond these odds against a token e^x would overflow; it survives with 1e-35 then.
constexpr float kMostOdds = 80.0f;

// `calibration.survival_of_columns`: [R, K] of logits, scales and biases of [K], or of [R, K] where
// requests differ.
Tensor survivals(const Tensor& any_logits, const Tensor& scales, const Tensor& biases) {
  const Tensor logits = any_logits.contiguous();
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, "logits must be float32");
  const int64_t num_requests = logits.size(0), size = logits.size(1), count = logits.numel();
  TORCH_CHECK(scales.sizes() == biases.sizes() && scales.scalar_type() == at::kFloat &&
                  biases.scalar_type() == at::kFloat,
              "scales and biases must be float32 of one shape");
  const bool is_shared = scales.numel() == size;
  TORCH_CHECK(is_shared || scales.numel() == count, "scales of ", scales.sizes(),
              " do not fit logits of ", logits.sizes());
  const float* logit = contiguous_data<float>(logits, count, "logits");
  const float* scale = contiguous_data<float>(scales, is_shared ? size : count, "scales");
  const float* bias = contiguous_data<float>(biases, is_shared ? size : count, "biases");
  Tensor out = at::empty({num_requests, size}, logits.options());
  float* found = out.mutable_data_ptr<float>();
  for (int64_t r = 0; r < num_requests; ++r)
    for (int64_t k = 0; k < size; ++k) {
      const int64_t i = r * size + k, own = is_shared ? k : i;
      const float odds = -(scale[own] * logit[i] + bias[own]);
      found[i] = odds > kMostOdds ? kMostOdds : odds;  // NaN stays
    }
  const Scores odds = {Type::kFloat32, bytes(out), 0.0f, 1.0f};
  kernels().exponential_block(odds, 0, count, found);
  for (int64_t r = 0; r < num_requests; ++r) {
    float survival = 1.0f;
    for (int64_t i = r * size; i < (r + 1) * size; ++i) {
      survival *= 1.0f / (1.0f + found[i]);
      if (!(survival == survival)) survival = 0.0f;  // no number: nothing survives from here on
      found[i] = survival;
    }
  }
  return out;
}

// `prefix_scheduler.free_gain`, operation by operation.
std::vector<int64_t> best_prefixes(const Tensor& survivals, const Tensor& caps,
                                   const Tensor& seconds, double worth) {
  const Block block = block_of(survivals, caps);
  TORCH_CHECK(seconds.scalar_type() == at::kDouble && seconds.numel() > 0,
              "seconds must hold a float64 for each budget");
  const double* second = contiguous_data<double>(seconds, 1, "seconds");
  std::vector<uint32_t> keys;
  keys.reserve(static_cast<size_t>(survivals.numel()));
  for (int64_t r = 0; r < block.num_requests; ++r)
    for (int64_t k = 0; k < block.caps[r]; ++k) {
      const float value = block.at(r, k);
      if (!(value > 0.0f)) continue;  // what cannot survive is no candidate
      TORCH_CHECK(value <= 1.0f, "a token survives with a chance, not with ", value);
      uint32_t key;
      memcpy(&key, &value, sizeof(key));
      keys.push_back(key);
    }
  sort_falling(keys);
  const int64_t most =
      std::min<int64_t>(static_cast<int64_t>(keys.size()), seconds.numel() - 1);
  double sum = 0.0, best = -worth * second[0];
  int64_t budget = 0;
  for (int64_t b = 1; b <= most; ++b) {
    sum += static_cast<double>(value_of(keys[b - 1]));
    const double gain = -worth * second[b] + sum;
    if (gain > best) {
      best = gain;
      budget = b;
    }
  }
  if (budget == 0) return std::vector<int64_t>(static_cast<size_t>(block.num_requests), 0);
  return lengths_down_to(block, value_of(keys[budget - 1]), budget);
}

// `prefix_scheduler.priced`.
std::vector<int64_t> priced_prefixes(const Tensor& survivals, const Tensor& caps, double price,
                                     int64_t most) {
  Block block = block_of(survivals, caps);
  const float least = static_cast<float>(price);
  int64_t total = 0;
  for (int64_t r = 0; r < block.num_requests; ++r) {
    int64_t length = 0;
    for (int64_t k = 0; k < block.size; ++k) length += block.at(r, k) > least;
    block.caps[r] = std::min(length, block.caps[r]);
    total += block.caps[r];
  }
  if (total <= most) return block.caps;
  if (most <= 0) return std::vector<int64_t>(static_cast<size_t>(block.num_requests), 0);
  std::vector<float> values;
  values.reserve(static_cast<size_t>(total));
  for (int64_t r = 0; r < block.num_requests; ++r)
    for (int64_t k = 0; k < block.caps[r]; ++k) values.push_back(block.at(r, k));
  const auto last = values.begin() + (most - 1);
  std::nth_element(values.begin(), last, values.end(), std::greater<float>());
  return lengths_down_to(block, *last, most);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("survivals(Tensor logits, Tensor scales, Tensor biases) -> Tensor");
  m.def("best_prefixes(Tensor survivals, Tensor caps, Tensor seconds, float worth) -> int[]");
  m.def("priced_prefixes(Tensor survivals, Tensor caps, float price, int most) -> int[]");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("survivals", survivals);
  m.impl("best_prefixes", best_prefixes);
  m.impl("priced_prefixes", priced_prefixes);
}

}  // namespace dspark
