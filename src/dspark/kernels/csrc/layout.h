// Who sits where in a step, for operators that run it at once.
#pragma once

#include <tuple>

#include "host.h"

namespace dspark {

// Block tables, query starts, visible, positions, slots of `dspark.core.AttentionLayout`; `runs`
// are rows of the table of pages, starts and counts in turn. There are at least `least` rows and
// pages in the block tables, the spare ones zero. Throws for runs that the table does not hold.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lay_out(const Tensor& table,
                                                           at::IntArrayRef runs,
                                                           int64_t page_size, bool is_two_way,
                                                           int64_t least);

}  // namespace dspark
