// Cells of rows of scores that are forbidden: minus infinity is written there before anybody looks.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "host.h"

namespace dspark {

class Cells {
 public:
  // `pairs`: row and column in turn, the rows in order. Throws for cells outside of the matrix.
  void take(at::IntArrayRef pairs, int64_t num_rows, int64_t num_columns) {
    columns_.clear();
    starts_.clear();
    if (pairs.empty()) return;
    TORCH_CHECK(pairs.size() % 2 == 0, "a cell is a row and a column");
    int64_t last = 0;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      const int64_t row = pairs[i], column = pairs[i + 1];
      TORCH_CHECK(last <= row && row < num_rows && column >= 0 && column < num_columns,
                  "cell ", row, ", ", column, " after row ", last, " is not in order or not in ",
                  num_rows, " rows of ", num_columns);
      starts_.resize(static_cast<size_t>(row) + 1, static_cast<int64_t>(columns_.size()));
      columns_.push_back(column);
      last = row;
    }
    starts_.resize(static_cast<size_t>(num_rows) + 1, static_cast<int64_t>(columns_.size()));
  }

  // Of this row, those in columns [begin, end); `data` is the row's first column.
  void forbid(Type type, int64_t row, char* data, int64_t begin, int64_t end) const {
    if (starts_.empty()) return;
    for (int64_t i = starts_[static_cast<size_t>(row)]; i < starts_[static_cast<size_t>(row) + 1];
         ++i) {
      const int64_t column = columns_[static_cast<size_t>(i)];
      if (column < begin || column >= end) continue;
      if (type == Type::kFloat32)
        reinterpret_cast<float*>(data)[column] = -std::numeric_limits<float>::infinity();
      else
        reinterpret_cast<uint16_t*>(data)[column] = 0xff80;
    }
  }

 private:
  std::vector<int64_t> columns_, starts_;  // the columns of row n start at starts_[n]
};

}  // namespace dspark
