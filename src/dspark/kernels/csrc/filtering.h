// Top-k, top-p and min-p over one row of scores.
#pragma once

#include <vector>

#include "host.h"

namespace dspark {

// What a request's options keep of a row; the fields as in dspark.algorithms.filters.Filter.
struct Filter {
  int64_t top_k = 0;  // 0: all
  double top_p = 1.0;
  double min_p = 0.0;

  // Whether top-k drops anything of so many.
  bool cuts(int64_t width) const { return top_k > 0 && top_k < width; }
  bool keeps_all() const { return top_k == 0 && top_p == 1.0 && min_p == 0.0; }
};

// Of one row at a time; it keeps its memory. What top-k and top-p keep is a prefix of the row's
// ranking. It is the one that dspark.algorithms.prefix_search defines, with the exponentials of
// this library for masses, and found as there: without a sort, unless roundings could decide.
class RowFilter {
 public:
  // Writes minus infinity over what is dropped of float32 scores whose maximum is 0.
  void apply(const Kernels& k, float* scores, int64_t width, const Filter& filter);

  // A row of scores after the filter, in memory that lasts until the next call.
  Scores filtered(const Kernels& k, const Scores& row, int64_t width, const Filter& filter);

 private:
  struct Prefix {
    int64_t size;
    float last;  // its lowest score
  };

  Prefix prefix(const Kernels& k, const float* scores, int64_t width, const Filter& filter);
  void take_largest(const Kernels& k, const float* scores, int64_t width, int64_t count);
  bool find(const Kernels& k, const float* scores, int64_t width, double top_p, Prefix& found);
  Prefix by_sort(const Kernels& k, double top_p);
  double mass(const Kernels& k, const float* scores, int64_t count);

  std::vector<float> row_, lead_, rest_, masses_, maxima_;
  std::vector<double> bucket_masses_;
};

// That of the calling thread.
RowFilter& own_row_filter();

}  // namespace dspark
