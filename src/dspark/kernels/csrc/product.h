// A packed linear layer as the kernels take it, for operators that run several in one region.
#pragma once

#include <string.h>

#include <optional>
#include <vector>

#include "host.h"

namespace dspark {

// Parts of a PackedLinear: packed weight, bias, scales, sums; the last two only with int8.
struct Product {
  Weights weights;
  const char* packed;
  const float* bias;
  const float* scales;
  const int32_t* sums;
  int64_t num_units;
  int64_t num_outputs;

  int64_t num_panels() const { return ceil_div(num_outputs, kGroup * kPanelGroups); }
  int64_t row_bytes() const { return num_units * 4; }
};

inline Product product_of(const c10::List<std::optional<Tensor>>& parts, int64_t index,
                          int64_t num_inputs, int64_t num_outputs, at::ScalarType input_type) {
  const auto part = [&](int64_t i) -> std::optional<Tensor> {
    return parts.get(static_cast<size_t>(4 * index + i));
  };
  const Tensor packed = *part(0);
  const bool is_int8 = packed.scalar_type() == at::kChar;
  const int64_t per_unit = 4 / packed.element_size();
  TORCH_CHECK(packed.is_contiguous() && packed.dim() == 2 &&
                  (is_int8 || packed.scalar_type() == input_type) &&
                  packed.size(0) == ceil_div(num_outputs, kGroup) * kGroup &&
                  packed.size(1) == ceil_div(num_inputs, per_unit) * per_unit,
              num_inputs, " inputs and ", num_outputs, " outputs of type ", input_type,
              " do not fit the packed weight ", packed.sizes(), " of type ",
              packed.scalar_type());
  const auto floats = [&](int64_t i) -> const float* {
    const std::optional<Tensor> x = part(i);
    if (!x.has_value()) return nullptr;
    TORCH_CHECK(x->scalar_type() == at::kFloat && x->is_contiguous() &&
                x->numel() == num_outputs);
    return x->const_data_ptr<float>();
  };
  Product product = {is_int8                                  ? Weights::kInt8
                     : packed.scalar_type() == at::kBFloat16 ? Weights::kBFloat16
                                                             : Weights::kFloat32,
                     bytes(packed),
                     floats(1),
                     floats(2),
                     nullptr,
                     packed.size(1) / per_unit,
                     num_outputs};
  if (is_int8) {
    const std::optional<Tensor> sums = part(3);
    TORCH_CHECK(product.scales != nullptr && sums.has_value() &&
                sums->scalar_type() == at::kInt && sums->is_contiguous() &&
                sums->numel() == num_outputs);
    product.sums = sums->const_data_ptr<int32_t>();
  }
  return product;
}

// Rows as a product reads them: padded to whole units, quantized for int8 weights.
struct Operand {
  int64_t row_bytes = 0;
  bool is_int8 = false;
  std::vector<char> data;
  std::vector<float> scales;

  Operand() = default;
  Operand(const Product& product, int64_t num_rows)
      : row_bytes(product.row_bytes()), is_int8(product.weights == Weights::kInt8) {
    grow(num_rows);
  }

  // Another product and so many rows.
  void fit(const Product& product, int64_t num_rows) {
    const bool was_int8 = std::exchange(is_int8, product.weights == Weights::kInt8);
    if (std::exchange(row_bytes, product.row_bytes()) != row_bytes || was_int8 != is_int8)
      data.clear();  // rows end with zeros
    grow(num_rows);
  }
  // To so many rows at least.
  void grow(int64_t num_rows) {
    const size_t size = static_cast<size_t>(num_rows * row_bytes);
    if (size > data.size()) data.resize(size);
    if (is_int8 && static_cast<size_t>(num_rows) > scales.size())
      scales.resize(static_cast<size_t>(num_rows));
  }

  // Row n from `width` values at x.
  void set(const Kernels& k, Type type, int64_t n, const char* x, int64_t width) {
    char* const row = data.data() + n * row_bytes;
    if (is_int8)
      return k.quantize_row(type, x, width, reinterpret_cast<uint8_t*>(row), row_bytes,
                            scales.data() + n);
    memcpy(row, x, static_cast<size_t>(width * (type == Type::kBFloat16 ? 2 : 4)));  // else zeros
  }
};

// A product as the kernels read it: all but the rows that go in and where the outputs lie.
inline Linear linear_of(const Product& product, Type out_type) {
  Linear task = {};
  task.weights = product.weights;
  task.out_type = out_type;
  task.packed = product.packed;
  task.num_units = product.num_units;
  task.num_outputs = product.num_outputs;
  task.bias = product.bias;
  task.output_scales = product.scales;
  task.output_sums = product.sums;
  return task;
}

}  // namespace dspark
