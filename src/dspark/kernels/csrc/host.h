// What the sources that are compiled once share: tensors as bytes, the instruction set in use.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace dspark {

using at::Tensor;

// From `least` to `most`, none if that is fewer.
struct TokenNumbers {
  int64_t least, most;
};

struct Kernels {
  decltype(&avx2::linear) linear;
  decltype(&avx2::quantize_row) quantize_row;
  decltype(&avx2::place_bytes) place_bytes;
  decltype(&avx2::attention_scratch) attention_scratch;
  decltype(&avx2::attention_chunk) attention_chunk;
  decltype(&avx2::attention_merge) attention_merge;
  decltype(&avx2::attention_finish) attention_finish;
  decltype(&avx2::rms_norm) rms_norm;
  decltype(&avx2::silu_mul) silu_mul;
  decltype(&avx2::rotate) rotate;
  decltype(&avx2::best) best;
  decltype(&avx2::shared_draw) shared_draw;
  decltype(&avx2::exponential_block) exponential_block;
  decltype(&avx2::divide) divide;
  decltype(&avx2::clamp_at_zero) clamp_at_zero;
  decltype(&avx2::block_sum) block_sum;
  decltype(&avx2::score_row) score_row;
  decltype(&avx2::count_from) count_from;
  decltype(&avx2::keep_from) keep_from;
  decltype(&avx2::gather_from) gather_from;
  decltype(&avx2::part_maxima) part_maxima;
  decltype(&avx2::add_row) add_row;
  decltype(&avx2::dot) dot;
  decltype(&avx2::sum_words) sum_words;
  TokenNumbers streamed;  // of passes whose weights are asked for ahead, see weight_stream.h
};

// Of the instruction set in use; see `use_instructions`.
const Kernels& kernels();

inline const char* bytes(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }
inline char* mutable_bytes(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Type type_of(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "expected float32 or bfloat16, got ", x.scalar_type());
  return x.scalar_type() == at::kFloat ? Type::kFloat32 : Type::kBFloat16;
}

// The values of x, used in place; throws where they lie apart or are fewer than `size`.
template <class T>
const T* contiguous_data(const Tensor& x, int64_t size, const char* name) {
  TORCH_CHECK(x.is_contiguous() && x.numel() >= size, name, " must hold ", size,
              " contiguous values, got ", x.sizes());
  return x.const_data_ptr<T>();
}

// Zeroed memory for weights, one after the other in huge pages where the system has them. It comes
// in pieces of 64 MiB, each of which lives as long as a tensor in it.
Tensor zeros_for_weights(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace dspark
