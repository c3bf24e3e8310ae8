// `torch.ops.dspark.*`, one function each: checks arguments, spreads work over threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "attention_work.h"

namespace dspark {
namespace {

// Values of a row per 4-byte unit.
int64_t values_per_unit(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return 1;
    case at::kBFloat16:
      return 2;
    case at::kChar:
      return 4;
    default:
      TORCH_CHECK(false, "weights of dtype ", type, " cannot be packed");
  }
}

Weights weights_of(at::ScalarType type) {
  return type == at::kFloat      ? Weights::kFloat32
         : type == at::kBFloat16 ? Weights::kBFloat16
                                 : Weights::kInt8;
}

// weight [out, in] to [ceil(out / 16) * 16, padded in] in packed order.
Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "expected a weight [out, in], got ", weight.sizes());
  const int64_t per_unit = values_per_unit(weight.scalar_type());
  const int64_t size = weight.element_size();
  const int64_t num_outputs = weight.size(0), num_inputs = weight.size(1);
  TORCH_CHECK(num_inputs <= 65536 || per_unit != 4, "int32 sums hold at most 65536 inputs, not ",
              num_inputs);
  const int64_t num_groups = ceil_div(num_outputs, kGroup);
  const int64_t num_units = ceil_div(num_inputs, per_unit);
  const Tensor source = weight.contiguous();
  Tensor packed =
      zeros_for_weights({num_groups * kGroup, num_units * per_unit}, weight.options());
  const char* from = bytes(source);
  char* to = mutable_bytes(packed);
  at::parallel_for(0, num_groups, 16, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group / kPanelGroups * kPanelGroups;
      const int64_t width = std::min(kPanelGroups, num_groups - first);
      for (int64_t lane = 0; lane < kGroup; ++lane) {
        const int64_t output = group * kGroup + lane;
        if (output >= num_outputs) break;
        for (int64_t unit = 0; unit < num_units; ++unit) {
          const int64_t count = std::min(per_unit, num_inputs - unit * per_unit);
          const int64_t slot =
              first * num_units + unit * width + group - first;  // of 16 lanes of 4 bytes
          memcpy(to + (slot * kGroup + lane) * 4,
                 from + (output * num_inputs + unit * per_unit) * size,
                 static_cast<size_t>(count * size));
        }
      }
    }
  });
  return packed;
}

// x as rows, the last dimension contiguous.
Tensor rows_of(const Tensor& x) {
  const Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

std::vector<int64_t> with_last(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

const float* float_data(const std::optional<Tensor>& x, int64_t size, const char* name) {
  if (!x.has_value()) return nullptr;
  TORCH_CHECK(x->scalar_type() == at::kFloat && x->is_contiguous() && x->numel() == size, name,
              " must be ", size, " contiguous float32 values");
  return x->const_data_ptr<float>();
}

void run_linear(const Linear& task) {
  const int64_t num_panels = ceil_div(task.num_outputs, kGroup * kPanelGroups);
  const auto linear = kernels().linear;
  at::parallel_for(0, num_panels, 1,
                   [&](int64_t begin, int64_t end) { linear(task, begin, end); });
}

Tensor linear_packed(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                     int64_t num_outputs) {
  TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "x is ", x.scalar_type(),
              ", but the weight ", packed.scalar_type());
  TORCH_CHECK(x.scalar_type() != at::kChar && packed.is_contiguous());
  const int64_t per_unit = values_per_unit(packed.scalar_type());
  const int64_t num_units = packed.size(1) / per_unit;
  TORCH_CHECK(x.dim() >= 1 && ceil_div(x.size(-1), per_unit) == num_units &&
                  ceil_div(num_outputs, kGroup) * kGroup == packed.size(0),
              "x of ", x.sizes(), " and ", num_outputs, " outputs do not fit the packed weight ",
              packed.sizes());
  Tensor rows = rows_of(x);
  if (rows.size(1) % per_unit != 0) {  // the last unit needs a zero
    Tensor padded = at::empty({rows.size(0), num_units * per_unit}, x.options());
    padded.zero_();
    padded.narrow(1, 0, rows.size(1)).copy_(rows);
    rows = padded;
  }
  Tensor out = at::empty(with_last(x, num_outputs), x.options());
  if (out.numel() == 0) return out;
  Linear task = {};
  task.weights = weights_of(packed.scalar_type());
  task.out_type = type_of(x);
  task.packed = bytes(packed);
  task.num_units = num_units;
  task.num_outputs = num_outputs;
  task.x = bytes(rows);
  task.x_stride = rows.stride(0) * rows.element_size();
  task.num_tokens = rows.size(0);
  task.bias = float_data(bias, num_outputs, "bias");
  task.out = mutable_bytes(out);
  task.out_stride = num_outputs;
  run_linear(task);
  return out;
}

Tensor linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const Tensor& sums, const std::optional<Tensor>& bias) {
  const int64_t num_outputs = scales.numel();
  const int64_t num_units = packed.size(1) / 4;
  TORCH_CHECK(packed.scalar_type() == at::kChar && packed.is_contiguous());
  TORCH_CHECK(sums.scalar_type() == at::kInt && sums.is_contiguous() &&
              sums.numel() == num_outputs);
  TORCH_CHECK(x.dim() >= 1 && ceil_div(x.size(-1), 4) == num_units &&
                  ceil_div(num_outputs, kGroup) * kGroup == packed.size(0),
              "x of ", x.sizes(), " and ", num_outputs, " outputs do not fit the packed weight ",
              packed.sizes());
  const Tensor rows = rows_of(x);
  const Type type = type_of(x);
  const int64_t num_tokens = rows.size(0), width = rows.size(1), padded = num_units * 4;
  Tensor out = at::empty(with_last(x, num_outputs), x.options());
  if (out.numel() == 0) return out;
  Tensor quantized = at::empty({num_tokens, padded}, x.options().dtype(at::kByte));
  Tensor token_scales = at::empty({num_tokens}, x.options().dtype(at::kFloat));
  uint8_t* bytes_out = quantized.mutable_data_ptr<uint8_t>();
  float* scales_out = token_scales.mutable_data_ptr<float>();
  const char* from = bytes(rows);
  const int64_t stride = rows.stride(0) * rows.element_size();
  const auto quantize_row = kernels().quantize_row;
  at::parallel_for(0, num_tokens, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n)
                       quantize_row(type, from + n * stride, width, bytes_out + n * padded,
                                    padded, scales_out + n);
                   });
  Linear task = {};
  task.weights = Weights::kInt8;
  task.out_type = type;
  task.packed = bytes(packed);
  task.num_units = num_units;
  task.num_outputs = num_outputs;
  task.x = bytes(quantized);
  task.x_stride = padded;
  task.num_tokens = num_tokens;
  task.bias = float_data(bias, num_outputs, "bias");
  task.token_scales = scales_out;
  task.output_scales = float_data(scales, num_outputs, "scales");
  task.output_sums = sums.const_data_ptr<int32_t>();
  task.out = mutable_bytes(out);
  task.out_stride = num_outputs;
  run_linear(task);
  return out;
}

// Rows [G, E] of each token into the pages.
void write_pages(const Attention& a, bool is_key, const Tensor& x, const int64_t* slots) {
  const Kernels& k = kernels();
  const int64_t size = x.element_size();
  const char* from = bytes(x);
  at::parallel_for(0, x.size(0), 128, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t g = 0; g < x.size(1); ++g)
        write_row(k, a, is_key, from + (n * x.stride(0) + g * x.stride(1)) * size, slots[n], g);
  });
}

void run_attention(const Attention& a, AttentionWork& work, const at::TensorOptions& options) {
  const int64_t num_threads =
      std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), work.num_items()));
  const Tensor memory = at::empty({work.memory_size(num_threads)}, options.dtype(at::kFloat));
  float* const floats = memory.mutable_data_ptr<float>();
  for (int64_t group = 0; group < work.num_groups(); ++group) {
    at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        ReadAhead ahead = work.read_ahead(a, group, thread, num_threads);
        work.run(a, group, floats, thread, num_threads, ahead);
      }
    });
  }
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pages,
                 const Tensor& v_pages, const Tensor& block_tables, const Tensor& query_starts,
                 const Tensor& visible, const Tensor& positions, const Tensor& slots,
                 int64_t /*max_visible*/, double scale, std::optional<int64_t> window,
                 std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  const int64_t num_tokens = q.size(0), num_heads = q.size(1), head_dim = q.size(2);
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && k_pages.dim() == 4);
  const int64_t num_kv_heads = k_pages.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == num_tokens && k.size(1) == num_kv_heads &&
              k.size(2) == head_dim && num_heads % num_kv_heads == 0,
              "q ", q.sizes(), ", k ", k.sizes(), " and pages ", k_pages.sizes(),
              " do not fit each other");
  for (const Tensor& x : {k, v})
    TORCH_CHECK(x.scalar_type() == q.scalar_type() && (x.stride(-1) == 1 || head_dim == 1),
                "q, k and v must share a dtype and be contiguous in the last dimension");
  TORCH_CHECK(!window.has_value() || *window > 0, "window is ", *window);
  const Tensor queries = q.stride(2) == 1 || head_dim == 1 ? q : q.contiguous();
  Tensor out = at::empty(q.sizes(), q.options());
  if (num_tokens == 0) return out;

  const Layout layout =
      Layout::of(block_tables, query_starts, visible, positions, slots, num_tokens);
  Attention a = {};
  a.type = type_of(q);
  a.head_dim = head_dim;
  set_pages(a, k_pages, v_pages, num_kv_heads);
  layout.check(k_pages.size(0), a.page_size);
  write_pages(a, true, k, layout.slots);
  write_pages(a, false, v, layout.slots);

  a.q = bytes(queries);
  a.out = mutable_bytes(out);
  for (int i = 0; i < 2; ++i) {
    a.q_strides[i] = queries.stride(i);
    a.out_strides[i] = out.stride(i);
  }
  a.num_sharing = num_heads / num_kv_heads;
  a.visible = layout.visible;
  a.positions = layout.positions;
  a.window = window.value_or(0);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  std::optional<Tensor> sinks_float;
  if (sinks.has_value()) sinks_float = sinks->to(at::kFloat).contiguous();
  a.sinks = float_data(sinks_float, num_heads, "sinks_H");
  AttentionWork work(a, layout, num_kv_heads);
  run_attention(a, work, q.options());
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Type type = type_of(x);
  const int64_t width = x.size(-1);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() &&
              weight.numel() == width, "weight must be ", width, " values of the dtype of x");
  const Tensor rows = rows_of(x);
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t size = x.element_size(), stride = rows.stride(0) * size;
  const char* from = bytes(rows);
  const char* scale = bytes(weight);
  char* to = mutable_bytes(out);
  const auto norm = kernels().rms_norm;
  at::parallel_for(0, rows.size(0), std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n)
                       norm(type, from + n * stride, scale, to + n * width * size, width,
                            static_cast<float>(eps));
                   });
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  const Type type = type_of(gate_up);
  TORCH_CHECK(gate_up.size(-1) % 2 == 0, "expected gate and up side by side, got ", gate_up.sizes());
  const int64_t width = gate_up.size(-1) / 2;
  const Tensor rows = rows_of(gate_up);
  Tensor out = at::empty(with_last(gate_up, width), gate_up.options());
  const int64_t size = gate_up.element_size(), stride = rows.stride(0) * size;
  const char* from = bytes(rows);
  char* to = mutable_bytes(out);
  const auto gate = kernels().silu_mul;
  at::parallel_for(0, rows.size(0), std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n)
                       gate(type, from + n * stride, from + n * stride + width * size,
                            to + n * width * size, width);
                   });
  return out;
}

void rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  const int64_t num_tokens = q.size(0), rotary_dim = cos.size(-1);
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && k.size(0) == num_tokens &&
              q.scalar_type() == k.scalar_type());
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == num_tokens &&
              cos.scalar_type() == sin.scalar_type() && cos.is_contiguous() &&
              sin.is_contiguous(), "cos and sin must be contiguous tables [N, rotary_dim]");
  TORCH_CHECK(rotary_dim % 2 == 0 && rotary_dim <= q.size(2) && rotary_dim <= k.size(2) &&
              q.stride(2) == 1 && k.stride(2) == 1, "q and k must be contiguous in the last "
              "dimension, which must hold ", rotary_dim, " values");
  const Type type = type_of(q), table_type = type_of(cos);
  const int64_t table_bytes = rotary_dim * cos.element_size();
  const auto rotate = kernels().rotate;
  for (const Tensor& x : {q, k}) {
    char* data = mutable_bytes(x);
    const int64_t size = x.element_size();
    at::parallel_for(0, num_tokens, 64, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < x.size(1); ++h)
          rotate(type, data + (n * x.stride(0) + h * x.stride(1)) * size, table_type,
                 bytes(cos) + n * table_bytes, bytes(sin) + n * table_bytes, rotary_dim);
    });
  }
}

// One product of a layer: `parts` holds packed weight, bias, scales, sums; the last two for int8.
Tensor product(const Tensor& x, const std::optional<Tensor>* parts, int64_t num_outputs) {
  if (parts[2].has_value()) return linear_int8(x, *parts[0], *parts[2], *parts[3], parts[1]);
  return linear_packed(x, *parts[0], parts[1], num_outputs);
}

// A whole pre-norm decoder layer, the operators above in a row: a call from Python costs as much
// as a small operator, and a layer has a dozen of them.
//   norms: before attention, before the MLP, then per head of q and of k or none; eps of each
//   linears: four parts of each of qkv, output, gate_up, down
//   sizes: head_dim, query heads, key/value heads
Tensor decoder_layer(const Tensor& x, at::TensorList norms, at::ArrayRef<double> eps,
                     const c10::List<std::optional<Tensor>>& linears, at::IntArrayRef sizes,
                     const Tensor& cos, const Tensor& sin, const Tensor& k_pages,
                     const Tensor& v_pages, const Tensor& block_tables, const Tensor& query_starts,
                     const Tensor& visible, const Tensor& positions, const Tensor& slots,
                     double scale, std::optional<int64_t> window) {
  TORCH_CHECK((norms.size() == 2 || norms.size() == 4) && eps.size() == norms.size() &&
                  linears.size() == 16 && sizes.size() == 3 && x.dim() == 2,
              "decoder_layer takes 2 or 4 norms and 4 products");
  std::optional<Tensor> parts[16];
  for (size_t i = 0; i < 16; ++i) parts[i] = linears.get(i);
  const int64_t num_tokens = x.size(0), head_dim = sizes[0], num_q = sizes[1], num_kv = sizes[2];
  const Tensor qkv = product(rms_norm(x, norms[0], eps[0]), parts, (num_q + 2 * num_kv) * head_dim)
                         .view({num_tokens, num_q + 2 * num_kv, head_dim});
  Tensor q = qkv.narrow(1, 0, num_q), k = qkv.narrow(1, num_q, num_kv);
  if (norms.size() == 4) {
    q = rms_norm(q, norms[2], eps[2]);
    k = rms_norm(k, norms[3], eps[3]);
  }
  rotary(q, k, cos, sin);
  const Tensor seen =
      attention(q, k, qkv.narrow(1, num_q + num_kv, num_kv), k_pages, v_pages, block_tables,
                query_starts, visible, positions, slots, 0, scale, window, {}, {});
  const Tensor mid = product(seen.view({num_tokens, num_q * head_dim}), parts + 4, x.size(1));
  mid.add_(x);
  const int64_t num_gate_up = parts[10].has_value() ? parts[10]->numel() : parts[8]->size(0);
  const Tensor gate_up = product(rms_norm(mid, norms[1], eps[1]), parts + 8, num_gate_up);
  const Tensor out = product(silu_mul(gate_up), parts + 12, x.size(1));
  return out.add_(mid);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, Tensor? bias, SymInt num_outputs) -> Tensor");
  m.def(
      "linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor sums, Tensor? bias) -> Tensor");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, "
      "Tensor block_tables, Tensor query_starts, Tensor visible, Tensor positions, Tensor slots, "
      "SymInt max_visible, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("rotary(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()");
  m.def(
      "decoder_layer(Tensor x, Tensor[] norms, float[] eps, Tensor?[] linears, int[] sizes, "
      "Tensor cos, Tensor sin, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_tables, "
      "Tensor query_starts, Tensor visible, Tensor positions, Tensor slots, float scale, "
      "int? window) -> Tensor");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("pack_linear", pack_linear);
  m.impl("linear_packed", linear_packed);
  m.impl("linear_int8", linear_int8);
  m.impl("attention", attention);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("rotary", rotary);
  m.impl("decoder_layer", decoder_layer);
}

}  // namespace dspark
