// Top-k, top-p and min-p over rows of scores, and the operator of that name.
#include "filtering.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace dspark {
namespace {

// A row is cut into this many parts, whose maxima give a floor under the largest few scores.
constexpr int64_t kParts = 1024;
constexpr int64_t kBuckets = 512;
// Up to here a sort costs less than anything else.
constexpr int64_t kSortedAtOnce = 64;

constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

Scores as_they_are(const float* scores) {
  return {Type::kFloat32, reinterpret_cast<const char*>(scores), 0.0f, 1.0f};
}

}  // namespace

void RowFilter::apply(const Kernels& k, float* scores, int64_t width, const Filter& filter) {
  float floor = -INFINITY;
  int64_t surplus = 0;  // of the tokens at the floor, which go by lowest id
  if (filter.cuts(width) || filter.top_p < 1.0) {
    const Prefix kept = prefix(k, scores, width, filter);
    floor = kept.last;
    surplus = k.count_from(scores, width, floor) - kept.size;
  }
  if (filter.min_p > 0.0) {
    const float least = static_cast<float>(std::log(filter.min_p));
    if (least > floor) {
      floor = least;
      surplus = 0;
    }
  }
  k.keep_from(scores, width, floor);
  for (int64_t i = width - 1; surplus > 0; --i) {
    if (scores[i] != floor) continue;
    scores[i] = -INFINITY;
    --surplus;
  }
}

Scores RowFilter::filtered(const Kernels& k, const Scores& row, int64_t width,
                           const Filter& filter) {
  row_.resize(static_cast<size_t>(width));
  k.score_row(row, width, row_.data());
  apply(k, row_.data(), width, filter);
  return as_they_are(row_.data());
}

RowFilter::Prefix RowFilter::prefix(const Kernels& k, const float* scores, int64_t width,
                                    const Filter& filter) {
  const bool is_cut = filter.cuts(width);
  if (is_cut) {
    take_largest(k, scores, width, filter.top_k);
    scores = lead_.data();
    width = filter.top_k;
    if (filter.top_p == 1.0) return {width, *std::min_element(scores, scores + width)};
  }
  Prefix found = {0, 0.0f};
  if (width > kSortedAtOnce && find(k, scores, width, filter.top_p, found)) return found;
  if (!is_cut) lead_.assign(scores, scores + width);
  return by_sort(k, filter.top_p);
}

// The `count` largest scores, unordered, become the lead.
void RowFilter::take_largest(const Kernels& k, const float* scores, int64_t width, int64_t count) {
  lead_.resize(static_cast<size_t>(width));
  int64_t num_left = width;
  if (count <= kParts / 4 && width >= 4 * kParts) {
    // `count` parts hold a score no smaller than this maximum, so the largest are none smaller.
    maxima_.resize(kParts);
    k.part_maxima(scores, width / kParts * kParts, maxima_.data(), kParts);
    const auto nth = maxima_.begin() + (count - 1);
    std::nth_element(maxima_.begin(), nth, maxima_.end(), std::greater<float>());
    num_left = k.gather_from(scores, width, *nth, lead_.data());
  } else {
    std::copy(scores, scores + width, lead_.begin());
  }
  std::nth_element(lead_.begin(), lead_.begin() + (count - 1), lead_.begin() + num_left,
                   std::greater<float>());
  lead_.resize(static_cast<size_t>(count));
}

// Top-p's prefix of the ranking of some scores; false if roundings could decide it.
bool RowFilter::find(const Kernels& k, const float* scores, int64_t width, double top_p,
                     Prefix& found) {
  const double total = mass(k, scores, width);
  const double wanted = top_p * total;
  // Each of the four sums errs by at most width * epsilon / 2 of the total; twice all of that.
  const double slack = 4.0 * static_cast<double>(width) * kEpsilon * total;
  // Tokens this small hold less than 1 - top_p of the mass, all together.
  const double share = (1.0 - top_p) * total / static_cast<double>(width);
  const float floor = static_cast<float>(std::log(share) - 1e-3);
  if (!(floor < 0.0f)) return false;
  rest_.resize(static_cast<size_t>(width));
  const int64_t count = k.gather_from(scores, width, floor, rest_.data());
  masses_.resize(static_cast<size_t>(count));
  k.exponential_block(as_they_are(rest_.data()), 0, count, masses_.data());

  // Buckets from the largest scores down; which one a score is in follows from its value alone.
  const float scale = static_cast<float>(kBuckets) / -floor;
  const auto bucket_of = [&](float score) {
    return std::min<int64_t>(static_cast<int64_t>(-score * scale), kBuckets - 1);
  };
  bucket_masses_.assign(kBuckets, 0.0);
  for (int64_t i = 0; i < count; ++i)
    bucket_masses_[static_cast<size_t>(bucket_of(rest_[static_cast<size_t>(i)]))] +=
        static_cast<double>(masses_[static_cast<size_t>(i)]);
  double before = 0.0;
  int64_t bucket = 0;
  for (; bucket < kBuckets; ++bucket) {
    const double after = before + bucket_masses_[static_cast<size_t>(bucket)];
    if (std::abs(after - wanted) <= slack) return false;
    if (after > wanted) break;
    before = after;
  }
  if (bucket == kBuckets) return false;
  int64_t num_before = 0, num_inside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float score = rest_[static_cast<size_t>(i)];
    const int64_t own = bucket_of(score);
    if (own < bucket) ++num_before;
    if (own == bucket) rest_[static_cast<size_t>(num_inside++)] = score;
  }
  std::sort(rest_.begin(), rest_.begin() + num_inside, std::greater<float>());
  k.exponential_block(as_they_are(rest_.data()), 0, num_inside, masses_.data());
  for (int64_t i = 0; i < num_inside; ++i) {
    if (std::abs(before - wanted) <= slack) return false;
    before += static_cast<double>(masses_[static_cast<size_t>(i)]);
    if (std::abs(before - wanted) <= slack) return false;
    if (before < wanted) continue;
    found = {num_before + i + 1, rest_[static_cast<size_t>(i)]};
    return true;
  }
  return false;
}

// The same of the lead, by its definition; slow for long rows.
RowFilter::Prefix RowFilter::by_sort(const Kernels& k, double top_p) {
  const int64_t width = static_cast<int64_t>(lead_.size());
  std::sort(lead_.begin(), lead_.end(), std::greater<float>());
  masses_.resize(lead_.size());
  k.exponential_block(as_they_are(lead_.data()), 0, width, masses_.data());
  double total = 0.0;
  for (const float mass : masses_) total += static_cast<double>(mass);
  const double wanted = top_p * total;
  double running = 0.0;
  int64_t last = 0;
  for (; last + 1 < width; ++last) {
    running += static_cast<double>(masses_[static_cast<size_t>(last)]);
    if (running >= wanted) break;
  }
  return {last + 1, lead_[static_cast<size_t>(last)]};
}

double RowFilter::mass(const Kernels& k, const float* scores, int64_t count) {
  float block[kBlock];
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    k.exponential_block(as_they_are(scores + begin), 0, size, block);
    total += k.block_sum(block, size);
  }
  return total;
}

RowFilter& own_row_filter() {
  static thread_local RowFilter filter;
  return filter;
}

namespace {

void filter_rows(const Tensor& scores, at::IntArrayRef top_ks, at::ArrayRef<double> top_ps,
                 at::ArrayRef<double> min_ps) {
  TORCH_CHECK(scores.dim() == 2 && scores.stride(1) == 1 && scores.scalar_type() == at::kFloat,
              "expected rows of float32 scores, got ", scores.sizes(), " of ",
              scores.scalar_type());
  const int64_t num_rows = scores.size(0), width = scores.size(1);
  const auto size = static_cast<size_t>(num_rows);
  TORCH_CHECK(top_ks.size() == size && top_ps.size() == size && min_ps.size() == size,
              "expected a filter for each of ", num_rows, " rows");
  float* const data = scores.mutable_data_ptr<float>();
  const int64_t stride = scores.stride(0);
  const Kernels& k = kernels();
  at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const auto i = static_cast<size_t>(n);
      own_row_filter().apply(k, data + n * stride, width, {top_ks[i], top_ps[i], min_ps[i]});
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("filter_rows(Tensor(a!) scores, int[] top_ks, float[] top_ps, float[] min_ps) -> ()");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) { m.impl("filter_rows", filter_rows); }

}  // namespace dspark
