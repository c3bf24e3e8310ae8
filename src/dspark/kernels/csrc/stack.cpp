// All decoder layers of a model in one call: one parallel region in which the threads meet at
// barriers that spin. A layer is a dozen pieces of work of a few microseconds each, less than it
// takes to wake threads or to go through PyTorch's dispatcher.
//
// Each piece runs the kernel that the operator of its name runs, over the same rows, so a pass has
// the bits of `decoder_layer` called once for each layer.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_work.h"
#include "product.h"
#include "team.h"

namespace dspark {
namespace {

// Up to so many tokens, every thread normalises and quantises the rows for itself: that takes
// less time than to share the work and to wait for the others.
constexpr int64_t kPrivateTokens = 2;
constexpr int64_t kPanelOutputs = kGroup * kPanelGroups;
constexpr int64_t kGateSlice = 256;  // values of a row
constexpr int64_t kNoLayer = -2;

// Memory that is kept from call to call and only grows.
class Scratch {
 public:
  char* get(int64_t size) {
    if (size > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(ceil_div(size, 64) * 64))));
      TORCH_CHECK(memory_ != nullptr, "no memory for ", size, " bytes");
      size_ = size;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

struct Norm {
  const char* weight = nullptr;  // null: none
  float eps = 0;
};

struct Layer {
  Norm norm_in, norm_mid, norm_q, norm_k;
  std::vector<Product> heads;  // q, k and v from one product or from two
  Product out, gate_up, down;
  int64_t head_dim, num_q, num_kv, window;
  float scale;

  int64_t num_heads() const { return num_q + 2 * num_kv; }
};

// Rows of values in memory; `stride` bytes from one to the next.
struct Rows {
  char* data = nullptr;
  int64_t stride = 0;

  char* at(int64_t row) const { return data + row * stride; }
};

// What the products of a layer multiply: rows in the weights' type.
struct Inputs {
  Rows rows;
  float* scales;  // of the rows, with int8 weights
};

// Items of a row of work, `end` not among them.
struct Share {
  int64_t begin, end;
};

// A thread of the region.
struct Worker {
  int64_t number, count;
  Team& team;

  Share share(int64_t num_items) const {
    return {num_items * number / count, num_items * (number + 1) / count};
  }
  void meet() const { team.wait(count); }
};

// One call: who computes what in which order. Threads share it.
struct Pass {
  const Kernels& k;
  const std::vector<Layer>& layers;
  const Layout& layout;
  const std::vector<int64_t>& taps;  // layers whose outputs are copied out, -1: the input
  Type type{};
  int64_t size = 0;  // bytes of a value
  int64_t num_tokens = 0, width = 0;
  Norm final_norm{};
  Rows x{};       // the residual stream, at the end the result
  Rows tapped{};  // [num_tokens][taps][width]
  Type table_type{};
  int64_t rotary_dim = 0;
  Rows cos{}, sin{};  // by position

  std::vector<Attention> attention{};  // of each layer
  std::vector<AttentionWork*> work{};  // of each layer

  Rows inputs{};  // [num_tokens or num_threads * num_tokens]
  float* input_scales = nullptr;
  Rows heads{}, seen{}, gate_up{}, gated{}, gain{};
  float* attention_memory = nullptr;

  bool is_private() const { return num_tokens <= kPrivateTokens; }

  void run(const Worker& me);
  void run_layer(size_t index, const Worker& me);
  Inputs prepare(const Product& next, const Norm& norm, Rows from, int64_t values, const Worker& me);
  void multiply(const Product& product, const Inputs& from, char* out, int64_t out_stride,
                int64_t panel_begin, int64_t panel_end) const;
  void multiply_heads(const Layer& layer, const Inputs& from, const Worker& me) const;
  void add_product(const Product& product, const Inputs& from, int64_t layer, const Worker& me);
  void place_heads(const Layer& layer, const Attention& a, const Worker& me, ReadAhead& ahead);
  void attend(size_t index, const Worker& me, ReadAhead& ahead);
  void gate(const Layer& layer, const Worker& me);
  void copy_tap(int64_t layer, int64_t panel_begin, int64_t panel_end);
  void end_row(char* row, int64_t values) const;
};

int64_t unit_bytes(int64_t values, int64_t size) { return ceil_div(values * size, 4) * 4; }

// Zeros after the values of a row: products read whole units.
void Pass::end_row(char* row, int64_t values) const {
  memset(row + values * size, 0, static_cast<size_t>(unit_bytes(values, size) - values * size));
}

void Pass::run(const Worker& me) {
  const Share columns = me.share(ceil_div(width, kPanelOutputs));
  copy_tap(-1, columns.begin, columns.end);
  for (size_t i = 0; i < layers.size(); ++i) run_layer(i, me);
  if (final_norm.weight == nullptr) return;
  const Share rows = me.share(num_tokens);
  for (int64_t n = rows.begin; n < rows.end; ++n)
    k.rms_norm(type, x.at(n), final_norm.weight, x.at(n), width, final_norm.eps);
}

void Pass::run_layer(size_t index, const Worker& me) {
  const Layer& layer = layers[index];
  Inputs from = prepare(layer.heads[0], layer.norm_in, x, width, me);
  multiply_heads(layer, from, me);
  me.meet();
  ReadAhead ahead = work[index]->read_ahead(attention[index], 0, me.number, me.count);
  place_heads(layer, attention[index], me, ahead);
  me.meet();
  attend(index, me, ahead);
  me.meet();
  from = prepare(layer.out, {}, seen, layer.num_q * layer.head_dim, me);
  add_product(layer.out, from, kNoLayer, me);
  me.meet();
  from = prepare(layer.gate_up, layer.norm_mid, x, width, me);
  const Share panels = me.share(layer.gate_up.num_panels());
  multiply(layer.gate_up, from, gate_up.data, gate_up.stride, panels.begin, panels.end);
  me.meet();
  gate(layer, me);
  me.meet();
  from = prepare(layer.down, {}, gated, layer.gate_up.num_outputs / 2, me);
  add_product(layer.down, from, static_cast<int64_t>(index), me);
  me.meet();
}

// Rows as the next product takes them: normalised, quantised, or both; `values` of each row.
Inputs Pass::prepare(const Product& next, const Norm& norm, Rows from, int64_t values,
                     const Worker& me) {
  const bool is_int8 = next.weights == Weights::kInt8;
  if (norm.weight == nullptr && !is_int8) return {from, nullptr};
  const int64_t first = is_private() ? me.number * num_tokens : 0;
  const Inputs to = {{inputs.at(first), inputs.stride}, input_scales + first};
  const Share rows = is_private() ? Share{0, num_tokens} : me.share(num_tokens);
  const Rows normed = {to.rows.data + next.num_units * 4, to.rows.stride};  // behind the bytes
  for (int64_t n = rows.begin; n < rows.end; ++n) {
    const char* row = from.at(n);
    if (norm.weight != nullptr) {
      char* const at = is_int8 ? normed.at(n) : to.rows.at(n);
      k.rms_norm(type, row, norm.weight, at, values, norm.eps);
      row = at;
    }
    if (is_int8)
      k.quantize_row(type, row, values, reinterpret_cast<uint8_t*>(to.rows.at(n)),
                     next.num_units * 4, to.scales + n);
    else
      end_row(to.rows.at(n), values);
  }
  if (!is_private()) me.meet();
  return to;
}

void Pass::multiply(const Product& product, const Inputs& from, char* out, int64_t out_stride,
                    int64_t panel_begin, int64_t panel_end) const {
  if (panel_begin >= panel_end) return;
  Linear task = linear_of(product, type);
  task.x = from.rows.data;
  task.x_stride = from.rows.stride;
  task.num_tokens = num_tokens;
  task.token_scales = from.scales;
  task.out = out;
  task.out_stride = out_stride / size;
  k.linear(task, panel_begin, panel_end);
}

void Pass::multiply_heads(const Layer& layer, const Inputs& from, const Worker& me) const {
  int64_t num_panels = 0;
  for (const Product& product : layer.heads) num_panels += product.num_panels();
  const Share share = me.share(num_panels);
  int64_t first_panel = 0, first_output = 0;
  for (const Product& product : layer.heads) {
    const int64_t end = first_panel + product.num_panels();
    multiply(product, from, heads.data + first_output * size, heads.stride,
             std::max(share.begin, first_panel) - first_panel,
             std::min(share.end, end) - first_panel);
    first_panel = end;
    first_output += product.num_outputs;
  }
}

// x += product, each thread its own columns; the output of a layer may be tapped.
void Pass::add_product(const Product& product, const Inputs& from, int64_t layer, const Worker& me) {
  const Share panels = me.share(product.num_panels());
  multiply(product, from, gain.data, gain.stride, panels.begin, panels.end);
  const int64_t begin = panels.begin * kPanelOutputs;
  const int64_t end = std::min(panels.end * kPanelOutputs, width);
  if (begin >= end) return;
  for (int64_t n = 0; n < num_tokens; ++n)
    k.add_row(type, gain.at(n) + begin * size, x.at(n) + begin * size, end - begin);
  copy_tap(layer, panels.begin, panels.end);
}

void Pass::copy_tap(int64_t layer, int64_t panel_begin, int64_t panel_end) {
  const int64_t begin = panel_begin * kPanelOutputs;
  const int64_t end = std::min(panel_end * kPanelOutputs, width);
  for (size_t i = 0; i < taps.size(); ++i)
    for (int64_t n = 0; taps[i] == layer && begin < end && n < num_tokens; ++n)
      memcpy(tapped.at(n) + (static_cast<int64_t>(i) * width + begin) * size,
             x.at(n) + begin * size, static_cast<size_t>((end - begin) * size));
}

// Norms and rotation of each q and k head in place, k and v into their pages. Memory is idle
// meanwhile: the first keys that will be needed are asked for.
void Pass::place_heads(const Layer& layer, const Attention& a, const Worker& me,
                       ReadAhead& ahead) {
  const int64_t num_heads = layer.num_heads(), first_v = layer.num_q + layer.num_kv;
  const Share share = me.share(num_tokens * num_heads);
  const int64_t lines_per_head =
      ceil_div(ahead.lines_allowed, std::max<int64_t>(1, share.end - share.begin));
  for (int64_t i = share.begin; i < share.end; ++i) {
    ask(ahead, lines_per_head);
    const int64_t n = i / num_heads, head = i % num_heads;
    char* const row = heads.at(n) + head * layer.head_dim * size;
    if (head < first_v) {
      const Norm& norm = head < layer.num_q ? layer.norm_q : layer.norm_k;
      if (norm.weight != nullptr)
        k.rms_norm(type, row, norm.weight, row, layer.head_dim, norm.eps);
      k.rotate(type, row, table_type, cos.at(layout.positions[n]), sin.at(layout.positions[n]),
               rotary_dim);
    }
    if (head == num_heads - 1) end_row(seen.at(n), layer.num_q * layer.head_dim);
    if (head >= first_v)
      write_row(row, const_cast<char*>(a.v_pages), a.v_strides, a.page_size, layout.slots[n],
                head - first_v, layer.head_dim, size);
    else if (head >= layer.num_q)
      write_row(row, const_cast<char*>(a.k_pages), a.k_strides, a.page_size, layout.slots[n],
                head - layer.num_q, layer.head_dim, size);
  }
}

void Pass::attend(size_t index, const Worker& me, ReadAhead& ahead) {
  const Attention& a = attention[index];
  for (int64_t group = 0; group < work[index]->num_groups(); ++group) {
    if (group > 0) {
      me.meet();
      ahead = work[index]->read_ahead(a, group, me.number, me.count);
    }
    work[index]->run(a, group, attention_memory, me.number, me.count, ahead);
  }
}

void Pass::gate(const Layer& layer, const Worker& me) {
  const int64_t values = layer.gate_up.num_outputs / 2;
  const int64_t num_slices = ceil_div(values, kGateSlice);
  const Share share = me.share(num_tokens * num_slices);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t n = i / num_slices, begin = i % num_slices * kGateSlice;
    const char* const row = gate_up.at(n) + begin * size;
    k.silu_mul(type, row, row + values * size, gated.at(n) + begin * size,
               std::min(kGateSlice, values - begin));
    if (begin + kGateSlice >= values) end_row(gated.at(n), values);
  }
}

}  // namespace

// Weights of the layers, and memory for the work. Calls take turns.
struct Stack : torch::CustomClassHolder {
  using Optional = std::optional<Tensor>;

  // Of each layer: norms before attention, before the MLP, of q heads, of k heads (the last two or
  // none), and the eps of each; packed weight, bias, scales and sums of five products: heads, more
  // heads or nothing, output, gate_up, down, and the outputs of each; head_dim, query heads,
  // key/value heads, window or 0.
  Stack(std::vector<Optional> norms, std::vector<double> eps, const c10::List<Optional>& linears,
        std::vector<int64_t> outputs, std::vector<int64_t> sizes, std::vector<double> scales,
        Optional final_norm, double final_eps)
      : tensors_(std::move(norms)) {
    const size_t count = scales.size();
    TORCH_CHECK(count > 0 && tensors_.size() == 4 * count && eps.size() == 4 * count &&
                    linears.size() == 20 * count && outputs.size() == 5 * count &&
                    sizes.size() == 4 * count,
                "each layer of a stack takes 4 norms, 5 products and 4 sizes");
    TORCH_CHECK(tensors_[0].has_value(), "a layer starts with a norm");
    width_ = tensors_[0]->numel();
    dtype_ = tensors_[0]->scalar_type();
    for (size_t i = 0; i < count; ++i) {
      Layer layer = {};
      const int64_t* s = sizes.data() + 4 * i;
      layer.head_dim = s[0], layer.num_q = s[1], layer.num_kv = s[2], layer.window = s[3];
      layer.scale = static_cast<float>(scales[i]);
      TORCH_CHECK(s[0] > 0 && s[1] > 0 && s[2] > 0 && s[1] % s[2] == 0 && s[3] >= 0,
                  "layer ", i, " of a stack has impossible sizes");
      Norm* const to[] = {&layer.norm_in, &layer.norm_mid, &layer.norm_q, &layer.norm_k};
      for (size_t j = 0; j < 4; ++j)
        *to[j] = norm(tensors_[4 * i + j], eps[4 * i + j], j < 2 ? width_ : layer.head_dim);
      TORCH_CHECK(layer.norm_in.weight && layer.norm_mid.weight, "layer ", i, " lacks a norm");
      const auto has = [&](size_t j) { return linears.get(20 * i + 4 * j).has_value(); };
      const auto part = [&](size_t j, int64_t num_inputs) {
        TORCH_CHECK(has(j), "layer ", i, " of a stack lacks product ", j);
        return product_of(linears, static_cast<int64_t>(5 * i + j), num_inputs, outputs[5 * i + j],
                          dtype_);
      };
      layer.heads.push_back(part(0, width_));
      if (has(1)) layer.heads.push_back(part(1, width_));
      layer.out = part(2, layer.num_q * layer.head_dim);
      layer.gate_up = part(3, width_);
      layer.down = part(4, layer.gate_up.num_outputs / 2);
      int64_t num_outputs = 0;
      for (const Product& p : layer.heads) num_outputs += p.num_outputs;
      TORCH_CHECK(num_outputs == layer.num_heads() * layer.head_dim &&
                      layer.out.num_outputs == width_ && layer.down.num_outputs == width_ &&
                      layer.gate_up.num_outputs % 2 == 0,
                  "the products of layer ", i, " do not fit each other");
      layers_.push_back(std::move(layer));
    }
    final_norm_ = norm(final_norm, final_eps, width_);
    tensors_.push_back(std::move(final_norm));
    for (const Optional& tensor : linears) tensors_.push_back(tensor);
  }

  // Hidden states after the final norm [N, D], and the tapped ones side by side [N, taps * D].
  // `cos`, `sin`: rows by position. Keys and values of the tokens are written into the pages.
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& cos, const Tensor& sin,
                                     std::vector<Tensor> k_pages, std::vector<Tensor> v_pages,
                                     const Tensor& block_tables, const Tensor& query_starts,
                                     const Tensor& visible, const Tensor& positions,
                                     const Tensor& slots, std::vector<int64_t> taps) {
    TORCH_CHECK(x.dim() == 2 && x.size(1) == width_ && x.scalar_type() == dtype_,
                "expected rows of ", width_, " values of ", dtype_, ", got ", x.sizes(), " of ",
                x.scalar_type());
    const int64_t num_tokens = x.size(0), num_taps = static_cast<int64_t>(taps.size());
    const Tensor out = x.clone(at::MemoryFormat::Contiguous);
    const Tensor tapped = at::empty({num_tokens, num_taps * width_}, x.options());
    if (num_tokens == 0) return {out, tapped};
    const Layout layout =
        Layout::of(block_tables, query_starts, visible, positions, slots, num_tokens);
    check_tables(cos, sin, layout);
    check_pages(k_pages, v_pages, layout);
    const std::lock_guard<std::mutex> guard(mutex_);

    Pass pass = {kernels(), layers_, layout, taps};
    pass.type = type_of(x);
    pass.size = x.element_size();
    pass.num_tokens = num_tokens;
    pass.width = width_;
    pass.final_norm = final_norm_;
    pass.x = {mutable_bytes(out), width_ * pass.size};
    pass.tapped = {mutable_bytes(tapped), num_taps * width_ * pass.size};
    pass.table_type = type_of(cos);
    pass.rotary_dim = cos.size(1);
    const int64_t table_stride = cos.size(1) * cos.element_size();
    pass.cos = {const_cast<char*>(bytes(cos)), table_stride};
    pass.sin = {const_cast<char*>(bytes(sin)), table_stride};
    run(pass, k_pages, v_pages);
    return {out, tapped};
  }

 private:
  Norm norm(const Optional& weight, double eps, int64_t size) const {
    if (!weight.has_value()) return {};
    TORCH_CHECK(weight->scalar_type() == dtype_ && weight->numel() == size &&
                    weight->is_contiguous(),
                "a norm must hold ", size, " contiguous values of ", dtype_);
    return {bytes(*weight), static_cast<float>(eps)};
  }

  void check_tables(const Tensor& cos, const Tensor& sin, const Layout& layout) const {
    TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.is_contiguous() &&
                    sin.is_contiguous() && cos.scalar_type() == sin.scalar_type() &&
                    cos.size(1) % 2 == 0,
                "cos and sin must be contiguous tables [positions, rotary_dim]");
    for (const Layer& layer : layers_)
      TORCH_CHECK(cos.size(1) <= layer.head_dim, "a head of ", layer.head_dim,
                  " values cannot be rotated by ", cos.size(1));
    for (int64_t n = 0; n < layout.num_tokens; ++n)
      TORCH_CHECK(layout.positions[n] >= 0 && layout.positions[n] < cos.size(0), "position ",
                  layout.positions[n], " is not in tables of ", cos.size(0));
  }

  void check_pages(const std::vector<Tensor>& k_pages, const std::vector<Tensor>& v_pages,
                   const Layout& layout) const {
    TORCH_CHECK(k_pages.size() == layers_.size() && v_pages.size() == layers_.size(),
                "a stack of ", layers_.size(), " layers takes as many keys and values, not ",
                k_pages.size(), " and ", v_pages.size());
    for (size_t i = 0; i < layers_.size(); ++i)
      for (const Tensor* pages : {&k_pages[i], &v_pages[i]})
        TORCH_CHECK(pages->dim() == 4 && pages->scalar_type() == dtype_ &&
                        pages->size(0) == k_pages[0].size(0) &&
                        pages->size(1) == layers_[i].num_kv &&
                        pages->size(2) == k_pages[0].size(2) &&
                        pages->size(3) == layers_[i].head_dim && pages->stride(3) == 1,
                    "pages of layer ", i, " are ", pages->sizes(), " of ", pages->scalar_type());
    layout.check(k_pages[0].size(0), k_pages[0].size(2));
  }

  // Layers that see alike share their plan.
  AttentionWork* work_of(const Layer& layer, const Attention& a, const Layout& layout) {
    for (const auto& [like, work] : works_)
      if (like->window == layer.window && like->num_q == layer.num_q &&
          like->num_kv == layer.num_kv && like->head_dim == layer.head_dim)
        return work.get();
    works_.emplace_back(&layer, std::make_unique<AttentionWork>(a, layout, layer.num_kv));
    return works_.back().second.get();
  }

  void plan_attention(Pass& pass, const std::vector<Tensor>& k_pages,
                      const std::vector<Tensor>& v_pages) {
    works_.clear();
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      Attention a = {};
      a.type = pass.type;
      a.k_pages = bytes(k_pages[i]);
      a.v_pages = bytes(v_pages[i]);
      for (int j = 0; j < 3; ++j) {
        a.k_strides[j] = k_pages[i].stride(j);
        a.v_strides[j] = v_pages[i].stride(j);
      }
      a.page_size = k_pages[i].size(2);
      a.head_dim = layer.head_dim;
      a.num_sharing = layer.num_q / layer.num_kv;
      a.visible = pass.layout.visible;
      a.positions = pass.layout.positions;
      a.window = layer.window;
      a.scale = layer.scale;
      pass.attention.push_back(a);
      pass.work.push_back(work_of(layer, a, pass.layout));
    }
  }

  Rows rows(Scratch& scratch, int64_t count, int64_t row_bytes) const {
    const int64_t stride = ceil_div(row_bytes, 64) * 64;
    return {scratch.get(count * stride), stride};
  }

  void run(Pass& pass, const std::vector<Tensor>& k_pages, const std::vector<Tensor>& v_pages) {
    plan_attention(pass, k_pages, v_pages);
    int64_t heads = 0, seen = 0, gates = 0, inputs = unit_bytes(width_, pass.size);
    int64_t most_values = width_;
    for (const Layer& layer : layers_) {
      heads = std::max(heads, layer.num_heads() * layer.head_dim);
      seen = std::max(seen, layer.num_q * layer.head_dim);
      gates = std::max(gates, layer.gate_up.num_outputs / 2);
    }
    most_values = std::max({most_values, seen, gates});
    const int64_t num_threads = at::get_num_threads();
    const int64_t n = pass.num_tokens, copies = pass.is_private() ? num_threads : 1;
    // Quantised bytes of a row lie before its normalised values.
    inputs += ceil_div(most_values, 4) * 4;
    pass.inputs = rows(inputs_, copies * n, inputs);
    pass.input_scales = reinterpret_cast<float*>(scales_.get(copies * n * 4));
    pass.heads = rows(heads_, n, heads * pass.size);
    pass.seen = rows(seen_, n, unit_bytes(seen, pass.size));
    pass.gate_up = rows(gate_up_, n, 2 * gates * pass.size);
    pass.gated = rows(gated_, n, unit_bytes(gates, pass.size));
    pass.gain = rows(gain_, n, width_ * pass.size);
    int64_t memory = 0;
    for (const auto& [layer, work] : works_)
      memory = std::max(memory, work->memory_size(num_threads));
    pass.attention_memory = reinterpret_cast<float*>(memory_.get(memory * 4));
    for (Attention& a : pass.attention) {
      a.q = pass.heads.data;
      a.q_strides[0] = pass.heads.stride / pass.size;
      a.out = pass.seen.data;
      a.out_strides[0] = pass.seen.stride / pass.size;
      a.q_strides[1] = a.out_strides[1] = a.head_dim;
    }
    run_team([&](int64_t number, int64_t count, Team& team) { pass.run({number, count, team}); });
  }

  std::vector<Optional> tensors_;  // keeps the weights alive
  std::vector<Layer> layers_;
  Norm final_norm_;
  int64_t width_;
  at::ScalarType dtype_;
  std::mutex mutex_;
  std::vector<std::pair<const Layer*, std::unique_ptr<AttentionWork>>> works_;
  Scratch inputs_, scales_, heads_, seen_, gate_up_, gated_, gain_, memory_;
};

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.class_<Stack>("Stack")
      .def(torch::init<std::vector<std::optional<Tensor>>, std::vector<double>,
                       c10::List<std::optional<Tensor>>, std::vector<int64_t>,
                       std::vector<int64_t>, std::vector<double>, std::optional<Tensor>, double>())
      .def("forward", &Stack::forward);
}

}  // namespace dspark
