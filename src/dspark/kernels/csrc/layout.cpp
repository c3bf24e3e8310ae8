// Who sits where in a step: the arrays of dspark.core.AttentionLayout from runs of positions.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "layout.h"

namespace dspark {
namespace {

// Consecutive positions of one row of the table of pages.
struct Run {
  int64_t row, start, count;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lay_out(const Tensor& table,
                                                           at::IntArrayRef runs,
                                                           int64_t page_size, bool is_two_way,
                                                           int64_t least) {
  TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && table.scalar_type() == at::kInt &&
                  page_size > 0 && runs.size() % 3 == 0,
              "a layout takes an int32 table of pages, and three numbers for each run");
  const int64_t num_runs = static_cast<int64_t>(runs.size()) / 3, width = table.size(1);
  const auto run_of = [&](int64_t r) {
    const int64_t* const x = runs.data() + 3 * r;
    return Run{x[0], x[1], x[2]};
  };
  int64_t num_tokens = 0, num_used = 1;
  for (int64_t r = 0; r < num_runs; ++r) {
    const Run run = run_of(r);
    TORCH_CHECK(run.row >= 0 && run.row < table.size(0) && run.start >= 0 && run.count >= 0 &&
                    run.start + run.count <= width * page_size,
                "positions ", run.start, " to ", run.start + run.count, " of row ", run.row,
                " are not in a table of pages of ", table.sizes());
    num_tokens += run.count;
    num_used = std::max(num_used, ceil_div(run.start + run.count, page_size));
  }
  num_used = std::min(num_used, width);
  const int64_t num_rows = std::max(least, num_runs), num_pages = std::max(least, num_used);
  const auto ints = table.options();
  const auto longs = ints.dtype(at::kLong);
  Tensor tables = at::empty({num_rows, num_pages}, ints);
  Tensor starts = at::empty({num_rows + 1}, ints), visible = at::empty({num_tokens}, ints);
  Tensor positions = at::empty({num_tokens}, longs), slots = at::empty({num_tokens}, longs);
  const int32_t* const pages = table.const_data_ptr<int32_t>();
  int32_t* const to_table = tables.mutable_data_ptr<int32_t>();
  int32_t* const to_start = starts.mutable_data_ptr<int32_t>();
  int32_t* const to_visible = visible.mutable_data_ptr<int32_t>();
  int64_t* const to_position = positions.mutable_data_ptr<int64_t>();
  int64_t* const to_slot = slots.mutable_data_ptr<int64_t>();
  std::fill(to_table, to_table + num_rows * num_pages, 0);
  std::fill(to_start, to_start + num_rows + 1, static_cast<int32_t>(num_tokens));
  int64_t n = 0;
  for (int64_t r = 0; r < num_runs; ++r) {
    const Run run = run_of(r);
    const int32_t* const own = pages + run.row * width;
    std::copy(own, own + num_used, to_table + r * num_pages);
    to_start[r] = static_cast<int32_t>(n);
    for (int64_t i = run.start; i < run.start + run.count; ++i, ++n) {
      to_visible[n] = static_cast<int32_t>(is_two_way ? run.start + run.count : i + 1);
      to_position[n] = i;
      to_slot[n] = own[i / page_size] * page_size + i % page_size;
    }
  }
  return {tables, starts, visible, positions, slots};
}

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def(
      "lay_out(Tensor table, int[] runs, int page_size, bool is_two_way, int least) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) { m.impl("lay_out", lay_out); }

}  // namespace dspark
