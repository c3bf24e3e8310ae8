// All decoder layers of a model in one call: one parallel region in which the threads meet at
// barriers that spin. A layer is a dozen pieces of work of a few microseconds each, less than it
// takes to wake threads or to go through PyTorch's dispatcher.
//
// Each piece runs the kernel that the operator of its name runs, over the same rows, so a pass has
// the bits of `decoder_layer` called once for each layer.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "cells.h"
#include "decision.h"
#include "layout.h"
#include "stack.h"

namespace dspark {
namespace {

// Up to so many tokens, every thread normalises and quantises the rows for itself: that takes
// less time than to share the work, to wait for the others and to fetch what they wrote (measured
// on two threads: 4 % of a pass in int8 for 4 and 8 tokens, 1 % in bfloat16).
constexpr int64_t kPrivateTokens = 8;
constexpr int64_t kFirstLines = 256;  // that are asked for before anything is computed
// Lines that a thread may ask for before it reads them. Measured: from 256 KiB on, memory answers
// a tenth fewer, although the second-level cache has 2 MiB.
constexpr int64_t kLinesAhead = 1536;
constexpr int64_t kGateSlice = 256;  // values of a row
constexpr int64_t kNoLayer = -2;

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
  // Whether a head is whole panels of one product, and the gates of the MLP whole panels: a thread
  // then goes on with what it has multiplied itself.
  bool has_whole_heads, has_whole_gates;

  int64_t num_heads() const { return num_q + 2 * num_kv; }
  int64_t num_gates() const { return gate_up.num_outputs / 2; }
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
  const Product* head = nullptr;  // null: no logits
  const char* head_divisors = nullptr;  // of its inputs, or null
  Rows x{};       // the residual stream
  Rows hidden{};  // of the final norm, or x
  Rows logits{};
  Rows tapped{};  // [num_tokens][taps][width]
  const Cells* forbidden = nullptr;  // cells of the logits; null: none
  Best* bests = nullptr;  // of each thread's logits [num_threads][num_tokens], if they are wanted
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
  bool is_streamed() const {
    return num_tokens >= k.streamed.least && num_tokens <= k.streamed.most;
  }

  void run(const Worker& me);
  void run_layer(size_t index, const Worker& me);
  Inputs prepare(const Product& next, const Norm& norm, Rows from, int64_t values, const Worker& me,
                 const char* divisors = nullptr);
  void multiply(const Product& product, const Inputs& from, char* out, int64_t out_stride,
                Share panels, const Worker& me) const;
  void add_product(const Product& product, const Inputs& from, int64_t layer, const Worker& me);
  void make_heads(size_t index, const Inputs& from, const Worker& me, ReadAhead& ahead);
  void place_heads(const Layer& layer, const Attention& a, Share tokens, Share heads,
                   ReadAhead& ahead, int64_t lines_per_head);
  void attend(size_t index, const Worker& me, ReadAhead& ahead);
  void make_gates(const Layer& layer, const Inputs& from, const Worker& me);
  void gate(const Layer& layer, int64_t token, int64_t begin, int64_t end);
  void copy_tap(int64_t layer, Share panels);
  void end_row(char* row, int64_t values) const;
  void find_bests(Share panels, const Worker& me) const;
};

int64_t unit_bytes(int64_t values, int64_t size) { return ceil_div(values * size, 4) * 4; }

// Zeros after the values of a row: products read whole units.
void Pass::end_row(char* row, int64_t values) const {
  memset(row + values * size, 0, static_cast<size_t>(unit_bytes(values, size) - values * size));
}

// Whole heads of a layer, or whole panels, of all products one after the other.
Share share_of_heads(size_t index, const Layer& layer, const Worker& me) {
  if (layer.has_whole_heads) {
    const int64_t num_panels = layer.head_dim / kPanelOutputs;
    const Share heads =
        index % 2 == 0 ? me.share(layer.num_heads()) : me.share_back(layer.num_heads());
    return {heads.begin * num_panels, heads.end * num_panels};
  }
  int64_t num_panels = 0;
  for (const Product& product : layer.heads) num_panels += product.num_panels();
  return me.share(num_panels);
}

// f(product, panels of it, its first output) for those among some panels of all heads.
template <class F>
void each_head_product(const Layer& layer, Share panels, const F& f) {
  int64_t first_panel = 0, first_output = 0;
  for (const Product& product : layer.heads) {
    const int64_t end = first_panel + product.num_panels();
    const Share own = {std::max(panels.begin, first_panel) - first_panel,
                       std::min(panels.end, end) - first_panel};
    if (own.begin < own.end) f(product, own, first_output);
    first_panel = end;
    first_output += product.num_outputs;
  }
}

// Panels of gates, then the panels of what they multiply; or one share of all.
std::pair<Share, Share> shares_of_gates(const Layer& layer, const Worker& me) {
  if (!layer.has_whole_gates) return {me.share(layer.gate_up.num_panels()), {0, 0}};
  const int64_t num_panels = layer.num_gates() / kPanelOutputs;
  const Share gates = me.share(num_panels);
  return {gates, {num_panels + gates.begin, num_panels + gates.end}};
}

// In the order in which a pass reads.
void read_layers(const std::vector<Layer>& layers, int64_t width, int64_t size, const Worker& me,
                 Reading& reading) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    reading.add(layer.norm_in.weight, width * size);
    each_head_product(layer, share_of_heads(i, layer, me),
                      [&](const Product& p, Share panels, int64_t) { reading.add(p, panels); });
    reading.add(layer.out, me.share(layer.out.num_panels()));
    reading.add(layer.norm_mid.weight, width * size);
    const auto [gates, ups] = shares_of_gates(layer, me);
    reading.add(layer.gate_up, gates);
    reading.add(layer.gate_up, ups);
    reading.add(layer.down, me.share(layer.down.num_panels()));
  }
}

template <class T>
void divide_values(const char* x, const char* by, char* out, int64_t count) {
  const T* const from = reinterpret_cast<const T*>(x);
  const T* const divisors = reinterpret_cast<const T*>(by);
  for (int64_t i = 0; i < count; ++i)
    reinterpret_cast<T*>(out)[i] =
        static_cast<T>(static_cast<float>(from[i]) / static_cast<float>(divisors[i]));
}

// Each quotient rounded once, as PyTorch does; `out` may be `x`.
void divide(Type type, const char* x, const char* by, char* out, int64_t count) {
  if (type == Type::kFloat32) return divide_values<float>(x, by, out, count);
  divide_values<c10::BFloat16>(x, by, out, count);
}

void Pass::run(const Worker& me) {
  copy_tap(-1, me.share(ceil_div(width, kPanelOutputs)));
  for (size_t i = 0; i < layers.size(); ++i) run_layer(i, me);
  if (final_norm.weight != nullptr) {
    const Share rows = me.share(num_tokens);
    for (int64_t n = rows.begin; n < rows.end; ++n)
      k.rms_norm(type, x.at(n), final_norm.weight, hidden.at(n), width, final_norm.eps);
  }
  if (head == nullptr) return;
  const Inputs from = prepare(*head, final_norm, x, width, me, head_divisors);
  const Share panels = me.share(head->num_panels());
  multiply(*head, from, logits.data, logits.stride, panels, me);
  if (bests != nullptr && panels.begin < panels.end) find_bests(panels, me);
}

// Of the logits that this thread has just written: they are in its caches still.
void Pass::find_bests(Share panels, const Worker& me) const {
  const int64_t begin = panels.begin * kPanelOutputs;
  const int64_t end = std::min(panels.end * kPanelOutputs, head->num_outputs);
  for (int64_t n = 0; n < num_tokens; ++n) {
    if (forbidden != nullptr) forbidden->forbid(type, n, logits.at(n), begin, end);
    Best& best = bests[me.number * num_tokens + n];
    best = k.best(type, logits.at(n) + begin * size, end - begin);
    best.column += begin;
  }
}

void Pass::run_layer(size_t index, const Worker& me) {
  const Layer& layer = layers[index];
  Inputs from = prepare(layer.heads[0], layer.norm_in, x, width, me);
  ReadAhead ahead = work[index]->read_ahead(attention[index], 0, me.number, me.count);
  make_heads(index, from, me, ahead);
  me.meet();
  attend(index, me, ahead);
  me.meet();
  from = prepare(layer.out, {}, seen, layer.num_q * layer.head_dim, me);
  add_product(layer.out, from, kNoLayer, me);
  me.meet();
  from = prepare(layer.gate_up, layer.norm_mid, x, width, me);
  make_gates(layer, from, me);
  me.meet();
  from = prepare(layer.down, {}, gated, layer.num_gates(), me);
  add_product(layer.down, from, static_cast<int64_t>(index), me);
  me.meet();
}

// Rows as the next product takes them: normalised, quantised, or both; `values` of each row.
// `divisors`, of quantised rows only: each value is divided, and rounded, before.
Inputs Pass::prepare(const Product& next, const Norm& norm, Rows from, int64_t values,
                     const Worker& me, const char* divisors) {
  const bool is_int8 = next.weights == Weights::kInt8;
  const bool has_whole_units = from.stride >= unit_bytes(values, size);
  if (norm.weight == nullptr && !is_int8 && has_whole_units) return {from, nullptr};
  if (norm.weight != nullptr) me.stream.ahead -= num_lines(norm.weight, values * size);
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
    if (divisors != nullptr) {
      divide(type, row, divisors, normed.at(n), values);
      row = normed.at(n);
    }
    if (row == from.at(n) && !is_int8)
      memcpy(to.rows.at(n), row, static_cast<size_t>(values * size));
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
                    Share panels, const Worker& me) const {
  if (panels.begin >= panels.end) return;
  Linear task = linear_of(product, type);
  task.x = from.rows.data;
  task.x_stride = from.rows.stride;
  task.num_tokens = num_tokens;
  task.token_scales = from.scales;
  task.out = out;
  task.out_stride = out_stride / size;
  if (is_streamed()) task.stream = &me.stream;
  each_side(product, panels, [&](const void* data, int64_t bytes) {
    me.stream.ahead -= num_lines(data, bytes);
  });
  k.linear(task, panels.begin, panels.end);
}

// x += product, each thread its own columns; the output of a layer may be tapped.
void Pass::add_product(const Product& product, const Inputs& from, int64_t layer, const Worker& me) {
  const Share panels = me.share(product.num_panels());
  multiply(product, from, gain.data, gain.stride, panels, me);
  const int64_t begin = panels.begin * kPanelOutputs;
  const int64_t end = std::min(panels.end * kPanelOutputs, width);
  if (begin >= end) return;
  for (int64_t n = 0; n < num_tokens; ++n)
    k.add_row(type, gain.at(n) + begin * size, x.at(n) + begin * size, end - begin);
  copy_tap(layer, panels);
}

void Pass::copy_tap(int64_t layer, Share panels) {
  const int64_t begin = panels.begin * kPanelOutputs;
  const int64_t end = std::min(panels.end * kPanelOutputs, width);
  for (size_t i = 0; i < taps.size(); ++i)
    for (int64_t n = 0; taps[i] == layer && begin < end && n < num_tokens; ++n)
      memcpy(tapped.at(n) + (static_cast<int64_t>(i) * width + begin) * size,
             x.at(n) + begin * size, static_cast<size_t>((end - begin) * size));
}

// Products, norms and rotation of the heads, k and v into their pages. Whole heads are placed by
// who multiplied them.
void Pass::make_heads(size_t index, const Inputs& from, const Worker& me, ReadAhead& ahead) {
  const Layer& layer = layers[index];
  const Share panels = share_of_heads(index, layer, me);
  each_head_product(layer, panels, [&](const Product& product, Share own, int64_t first_output) {
    multiply(product, from, heads.data + first_output * size, heads.stride, own, me);
  });
  const auto lines_for_each = [&](int64_t count) {
    return ceil_div(ahead.lines_allowed, std::max<int64_t>(1, count));
  };
  if (layer.has_whole_heads) {
    const int64_t num_panels = layer.head_dim / kPanelOutputs;
    const Share own = {panels.begin / num_panels, panels.end / num_panels};
    place_heads(layer, attention[index], {0, num_tokens}, own, ahead,
                lines_for_each(num_tokens * (own.end - own.begin)));
  } else {
    me.meet();
    const int64_t num_heads = layer.num_heads();
    const Share all = me.share(num_tokens * num_heads);
    const int64_t lines_per_head = lines_for_each(all.end - all.begin);
    for (int64_t i = all.begin; i < all.end; ++i)
      place_heads(layer, attention[index], {i / num_heads, i / num_heads + 1},
                  {i % num_heads, i % num_heads + 1}, ahead, lines_per_head);
  }
}

// Norms and rotation of q and k heads in place, k and v into their pages. The first keys that will
// be needed are asked for meanwhile.
void Pass::place_heads(const Layer& layer, const Attention& a, Share tokens, Share own,
                       ReadAhead& ahead, int64_t lines_per_head) {
  const int64_t num_heads = layer.num_heads(), first_v = layer.num_q + layer.num_kv;
  for (int64_t n = tokens.begin; n < tokens.end; ++n)
    for (int64_t head = own.begin; head < own.end; ++head) {
      ask(ahead, lines_per_head);
      char* const row = heads.at(n) + head * layer.head_dim * size;
      if (head < first_v) {
        const Norm& norm = head < layer.num_q ? layer.norm_q : layer.norm_k;
        if (norm.weight != nullptr)
          k.rms_norm(type, row, norm.weight, row, layer.head_dim, norm.eps);
        k.rotate(type, row, table_type, cos.at(layout.positions[n]), sin.at(layout.positions[n]),
                 rotary_dim);
      }
      if (head == num_heads - 1) end_row(seen.at(n), layer.num_q * layer.head_dim);
      if (head >= layer.num_q)
        write_row(k, a, head < first_v, row, layout.slots[n],
                  head - (head < first_v ? layer.num_q : first_v));
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

// The first product of the MLP, and silu(gate) * up of it. Whole panels of gates are multiplied by
// who has their products.
void Pass::make_gates(const Layer& layer, const Inputs& from, const Worker& me) {
  const auto [gates, ups] = shares_of_gates(layer, me);
  for (const Share& panels : {gates, ups})
    multiply(layer.gate_up, from, gate_up.data, gate_up.stride, panels, me);
  if (layer.has_whole_gates) {
    for (int64_t n = 0; n < num_tokens && gates.begin < gates.end; ++n)
      gate(layer, n, gates.begin * kPanelOutputs, gates.end * kPanelOutputs);
    return;
  }
  me.meet();
  const int64_t num_slices = ceil_div(layer.num_gates(), kGateSlice);
  const Share share = me.share(num_tokens * num_slices);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t begin = i % num_slices * kGateSlice;
    gate(layer, i / num_slices, begin, std::min(begin + kGateSlice, layer.num_gates()));
  }
}

void Pass::gate(const Layer& layer, int64_t token, int64_t begin, int64_t end) {
  const int64_t values = layer.num_gates();
  const char* const row = gate_up.at(token) + begin * size;
  k.silu_mul(type, row, row + values * size, gated.at(token) + begin * size, end - begin);
  if (end == values) end_row(gated.at(token), values);
}

}  // namespace

// Weights of the layers, and memory for the work. Calls take turns.
struct Stack : StackLayers {
  using Optional = std::optional<Tensor>;

  // Of each layer: norms before attention, before the MLP, of q heads, of k heads (the last two or
  // none), and the eps of each; packed weight, bias, scales and sums of five products: heads, more
  // heads or nothing, output, gate_up, down, and the outputs of each; head_dim, query heads,
  // key/value heads, window or 0.
  Stack(std::vector<Optional> norms, std::vector<double> eps, const c10::List<Optional>& linears,
        std::vector<int64_t> outputs, std::vector<int64_t> sizes, std::vector<double> scales,
        Optional final_norm, double final_eps, const c10::List<Optional>& head,
        int64_t head_outputs, Optional head_divisors, Optional embedding)
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
      layer.down = part(4, layer.num_gates());
      int64_t num_outputs = 0;
      layer.has_whole_heads = layer.head_dim % kPanelOutputs == 0;
      for (const Product& p : layer.heads) {
        num_outputs += p.num_outputs;
        layer.has_whole_heads &= p.num_outputs % layer.head_dim == 0;
      }
      layer.has_whole_gates = layer.num_gates() % kPanelOutputs == 0;
      TORCH_CHECK(num_outputs == layer.num_heads() * layer.head_dim &&
                      layer.out.num_outputs == width_ && layer.down.num_outputs == width_ &&
                      layer.gate_up.num_outputs % 2 == 0,
                  "the products of layer ", i, " do not fit each other");
      layers_.push_back(std::move(layer));
    }
    final_norm_ = norm(final_norm, final_eps, width_);
    tensors_.push_back(std::move(final_norm));
    for (const Optional& tensor : linears) tensors_.push_back(tensor);
    if (!head.empty()) head_ = product_of(head, 0, width_, head_outputs, dtype_);
    for (const Optional& tensor : head) tensors_.push_back(tensor);
    if (head_divisors.has_value()) {
      TORCH_CHECK(head_.has_value() && head_->weights == Weights::kInt8,
                  "only the inputs of an int8 head are divided");
      head_divisors_ = norm(head_divisors, 0, width_).weight;
      tensors_.push_back(std::move(head_divisors));
    }
    if (embedding.has_value()) {
      TORCH_CHECK(embedding->dim() == 2 && embedding->size(1) == width_ &&
                      embedding->scalar_type() == dtype_ && embedding->is_contiguous(),
                  "an embedding must hold contiguous rows of ", width_, " values of ", dtype_);
      embedding_ = std::move(embedding);
    }
  }

  // The pages as `forward` takes them.
  c10::intrusive_ptr<StackPages> bind(std::vector<Tensor> k_pages, std::vector<Tensor> v_pages) {
    TORCH_CHECK(k_pages.size() == layers_.size() && v_pages.size() == layers_.size(),
                "a stack of ", layers_.size(), " layers takes as many keys and values, not ",
                k_pages.size(), " and ", v_pages.size());
    auto pages = c10::make_intrusive<StackPages>();
    pages->owner = number_;
    pages->layers = c10::intrusive_ptr<StackLayers>::reclaim_copy(this);
    pages->num_pages = k_pages[0].size(0);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      Attention a = {};
      a.type = dtype_ == at::kBFloat16 ? Type::kBFloat16 : Type::kFloat32;
      a.head_dim = layer.head_dim;
      set_pages(a, k_pages[i], v_pages[i], layer.num_kv);
      a.num_sharing = layer.num_q / layer.num_kv;
      a.window = layer.window;
      a.scale = layer.scale;
      TORCH_CHECK(k_pages[i].size(0) == pages->num_pages &&
                      (i == 0 || a.page_size == pages->page_size),
                  "pages of layer ", i, " are ", k_pages[i].sizes(), ", unlike those of layer 0");
      pages->page_size = a.page_size;
      pages->attention.push_back(a);
    }
    for (auto* tensors : {&k_pages, &v_pages})
      for (Tensor& tensor : *tensors) pages->tensors.push_back(std::move(tensor));
    return pages;
  }

  // Hidden states after the final norm [N, D], the tapped ones side by side [N, taps * D], and
  // logits [N, V] if they are wanted, else [N, 0].
  // `x`: hidden states [N, D], or ids [N] of a stack with an embedding.
  // `cos`, `sin`: rows by position. Keys and values of the tokens are written into the pages.
  std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& cos, const Tensor& sin,
                                     const c10::intrusive_ptr<StackPages>& pages,
                                     const Tensor& block_tables, const Tensor& query_starts,
                                     const Tensor& visible, const Tensor& positions,
                                     const Tensor& slots, std::vector<int64_t> taps,
                                     bool has_logits) {
    TORCH_CHECK(!has_logits || head_.has_value(), "a stack without a head has no logits");
    const Tensor rows = rows_of(x);
    const Layout layout =
        Layout::of(block_tables, query_starts, visible, positions, slots, rows.size(0));
    const States states = run(rows, cos, sin, *pages, layout, taps, has_logits);
    return {states.hidden, states.tapped, states.logits};
  }

  // A step of requests whose logits nothing but a temperature and filters touch, from ids to the
  // verdict: `lay_out`, `forward` and `decide` in one. `runs`: rows of the table of pages, starts
  // and counts in turn, one run for each request: its anchor and what is verified of its drafts.
  // `counters`, `options`: the rows of a RoundTable one after the other. `forbidden`: rows and ids,
  // see `Cells`.
  // Gives states, accepted tokens, next tokens. States are, if they are wanted: ids, hidden
  // states, taps, the five arrays of the layout; then logits if a row's are not finite.
  std::tuple<std::vector<Tensor>, std::vector<int64_t>, std::vector<int64_t>> decode(
      std::vector<int64_t> ids, std::vector<int64_t> runs, const Tensor& table, const Tensor& cos,
      const Tensor& sin, const c10::intrusive_ptr<StackPages>& pages, std::vector<int64_t> taps,
      std::vector<int64_t> counters, std::vector<double> options, Optional tokens,
      Optional probs, Optional column_of, bool has_states, std::vector<int64_t> forbidden) {
    TORCH_CHECK(head_.has_value(), "a stack without a head has no verdict");
    const Rounds rounds = rounds_of(counters, options);
    const int64_t num_requests = rounds.size;
    TORCH_CHECK(static_cast<int64_t>(runs.size()) == 3 * num_requests,
                "expected 3 numbers of a run for each of ", num_requests, " requests");
    const auto [block_tables, query_starts, visible, positions, slots] =
        lay_out(table, runs, pages->page_size, false, kLeastRows);
    const Tensor rows = rows_of(ids.data(), static_cast<int64_t>(ids.size()));
    const Layout layout =
        Layout::of(block_tables, query_starts, visible, positions, slots, rows.size(0));
    std::vector<Best> bests;
    Cells cells;
    cells.take(forbidden, rows.size(0), head_->num_outputs);
    const States states = run(rows, cos, sin, *pages, layout, taps, true, &bests, &cells);

    std::vector<int64_t> starts, lengths;
    std::vector<int64_t> accepted(static_cast<size_t>(num_requests)), next(accepted.size());
    for (int64_t r = 0, start = 0; r < num_requests; ++r) {
      const int64_t count = runs[static_cast<size_t>(3 * r + 2)];
      starts.push_back(start);
      lengths.push_back(count - 1);
      start += count;
    }
    const ScoreRows logits = {type_of(states.logits), bytes(states.logits), rows.size(0),
                              head_->num_outputs,
                              head_->num_outputs * states.logits.element_size()};
    decide(logits, bests.data(), rounds, starts, lengths, {tokens, probs, column_of},
           accepted.data(), next.data());
    std::vector<Tensor> out;
    if (has_states) {
      Tensor ids_tensor = at::empty_like(positions);
      std::copy(ids.begin(), ids.end(), ids_tensor.mutable_data_ptr<int64_t>());
      out = {ids_tensor, states.hidden, states.tapped, block_tables,
             query_starts, visible,       positions,     slots};
    }
    if (std::any_of(next.begin(), next.end(), [](int64_t token) { return token < 0; }))
      out.push_back(states.logits);
    return {out, accepted, next};
  }

  void surround(const StackCall& call, const StackPages& pages, StackStages& stages) override {
    TORCH_CHECK(final_norm_.weight != nullptr, "a stack between stages needs a final norm");
    const std::lock_guard<std::mutex> guard(mutex_);
    const std::vector<int64_t> no_taps;
    Pass pass = pass_of(call.layout, call.cos, call.sin, pages, no_taps);
    pass.x.data = call.rows;
    pass.hidden.data = call.hidden;
    run(pass, &stages);
  }

  int64_t width() const override { return width_; }
  at::ScalarType dtype() const override { return dtype_; }

 private:
  static constexpr int64_t kLeastRows = 2;  // of a layout, as dspark.engine.batch has it

  struct States {
    Tensor hidden, tapped, logits;
  };

  // One pass over `rows`, which are used up. `bests`, if not null, becomes the best of each row of
  // the logits, in which `forbidden` cells are minus infinity.
  States run(const Tensor& rows, const Tensor& cos, const Tensor& sin, const StackPages& pages,
             const Layout& layout, const std::vector<int64_t>& taps, bool has_logits,
             std::vector<Best>* bests = nullptr, const Cells* forbidden = nullptr) {
    const int64_t num_tokens = rows.size(0), num_taps = static_cast<int64_t>(taps.size());
    const Tensor hidden = final_norm_.weight == nullptr ? rows : at::empty_like(rows);
    const Tensor logits =
        at::empty({num_tokens, has_logits ? head_->num_outputs : 0}, rows.options());
    const Tensor tapped = at::empty({num_tokens, num_taps * width_}, rows.options());
    if (num_tokens == 0) return {hidden, tapped, logits};
    const std::lock_guard<std::mutex> guard(mutex_);
    Pass pass = pass_of(layout, cos, sin, pages, taps);
    pass.head = has_logits ? &*head_ : nullptr;
    pass.head_divisors = head_divisors_;
    pass.x.data = mutable_bytes(rows);
    pass.hidden.data = mutable_bytes(hidden);
    pass.logits = {mutable_bytes(logits), logits.size(1) * pass.size};
    pass.tapped = {mutable_bytes(tapped), num_taps * width_ * pass.size};
    if (bests != nullptr) {
      bests->assign(static_cast<size_t>(at::get_num_threads() * num_tokens),
                    {-INFINITY, 0, false});
      pass.bests = bests->data();
      pass.forbidden = forbidden;
    }
    run(pass, nullptr);
    if (bests != nullptr) join(*bests, num_tokens);
    return {hidden, tapped, logits};
  }

  // What the arguments of a call tell; `layout` and `taps` stay in use.
  Pass pass_of(const Layout& layout, const Tensor& cos, const Tensor& sin, const StackPages& pages,
               const std::vector<int64_t>& taps) const {
    TORCH_CHECK(pages.owner == number_, "the pages are those of another stack");
    check_tables(cos, sin, layout);
    layout.check(pages.num_pages, pages.page_size);
    Pass pass = {kernels(), layers_, layout, taps};
    pass.type = dtype_ == at::kBFloat16 ? Type::kBFloat16 : Type::kFloat32;
    pass.size = size_of(pass.type);
    pass.num_tokens = layout.num_tokens;
    pass.width = width_;
    pass.final_norm = final_norm_;
    pass.x.stride = pass.hidden.stride = width_ * pass.size;
    pass.table_type = type_of(cos);
    pass.rotary_dim = cos.size(1);
    const int64_t table_stride = cos.size(1) * cos.element_size();
    pass.cos = {const_cast<char*>(bytes(cos)), table_stride};
    pass.sin = {const_cast<char*>(bytes(sin)), table_stride};
    pass.attention = pages.attention;
    return pass;
  }

  // Of all threads, whose columns rise: the first of equals has the lowest.
  static void join(std::vector<Best>& bests, int64_t num_tokens) {
    for (size_t i = static_cast<size_t>(num_tokens); i < bests.size(); ++i) {
      Best& best = bests[i % static_cast<size_t>(num_tokens)];
      const bool has_nan = best.has_nan || bests[i].has_nan;
      if (bests[i].value > best.value) best = bests[i];
      best.has_nan = has_nan;
    }
  }

  Norm norm(const Optional& weight, double eps, int64_t size) const {
    if (!weight.has_value()) return {};
    TORCH_CHECK(weight->scalar_type() == dtype_ && weight->numel() == size &&
                    weight->is_contiguous(),
                "a norm must hold ", size, " contiguous values of ", dtype_);
    return {bytes(*weight), static_cast<float>(eps)};
  }

  // The tokens as the first layer gets them, in memory of their own.
  Tensor rows_of(const Tensor& x) const {
    if (x.scalar_type() != at::kLong) {
      TORCH_CHECK(x.dim() == 2 && x.size(1) == width_ && x.scalar_type() == dtype_,
                  "expected rows of ", width_, " values of ", dtype_, ", got ", x.sizes(), " of ",
                  x.scalar_type());
      return x.clone(at::MemoryFormat::Contiguous);
    }
    TORCH_CHECK(x.dim() == 1, "expected ids in a row, got ", x.sizes());
    return rows_of(contiguous_data<int64_t>(x, x.size(0), "ids"), x.size(0));
  }

  Tensor rows_of(const int64_t* ids, int64_t count) const {
    TORCH_CHECK(embedding_.has_value(), "a stack without an embedding takes no ids");
    Tensor rows = at::empty({count, width_}, embedding_->options());
    const size_t row_bytes = static_cast<size_t>(width_ * rows.element_size());
    char* to = mutable_bytes(rows);
    for (int64_t n = 0; n < count; ++n, to += row_bytes) {
      TORCH_CHECK(ids[n] >= 0 && ids[n] < embedding_->size(0), "id ", ids[n],
                  " is not in an embedding of ", embedding_->size(0));
      memcpy(to, bytes(*embedding_) + static_cast<size_t>(ids[n]) * row_bytes, row_bytes);
    }
    return rows;
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

  // Layers that see alike share their plan.
  AttentionWork* work_of(const Layer& layer, const Attention& a, const Layout& layout) {
    for (const auto& [like, work] : works_)
      if (like->window == layer.window && like->num_q == layer.num_q &&
          like->num_kv == layer.num_kv && like->head_dim == layer.head_dim)
        return work.get();
    works_.emplace_back(&layer, std::make_unique<AttentionWork>(a, layout, layer.num_kv));
    return works_.back().second.get();
  }

  void plan_attention(Pass& pass) {
    works_.clear();
    for (size_t i = 0; i < layers_.size(); ++i) {
      Attention& a = pass.attention[i];
      a.visible = pass.layout.visible;
      a.positions = pass.layout.positions;
      pass.work.push_back(work_of(layers_[i], a, pass.layout));
    }
  }

  Rows rows(Scratch& scratch, int64_t count, int64_t row_bytes) const {
    const int64_t stride = ceil_div(row_bytes, 64) * 64;
    return {scratch.get(count * stride), stride};
  }

  void run(Pass& pass, StackStages* stages) {
    plan_attention(pass);
    int64_t heads = 0, seen = 0, gates = 0, inputs = unit_bytes(width_, pass.size);
    int64_t most_values = width_;
    for (const Layer& layer : layers_) {
      heads = std::max(heads, layer.num_heads() * layer.head_dim);
      seen = std::max(seen, layer.num_q * layer.head_dim);
      gates = std::max(gates, layer.num_gates());
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
    readings_.resize(static_cast<size_t>(num_threads));
    run_team([&](int64_t number, int64_t count, Team& team) {
      WeightStream stream = {};
      const Worker me = {number, count, team, stream};
      if (pass.is_streamed()) stream = stream_of(pass, me, stages);
      ask(stream, std::min(kFirstLines, stream.limit));
      if (stages != nullptr) stages->before(me);
      pass.run(me);
      if (stages != nullptr) stages->after(me);
    });
  }

  // What a thread reads in a call, if it is known.
  struct KnownReading {
    int64_t num_threads = 0;  // the others read the rest; 0: not known yet
    int64_t stages = 0;       // their number, 0 without them
    Reading reading;
    int64_t num_of_layers = 0;  // stretches; those of the head follow
  };

  WeightStream stream_of(const Pass& pass, const Worker& me, const StackStages* stages) {
    KnownReading& known = readings_[static_cast<size_t>(me.number)];
    const int64_t number = stages == nullptr ? 0 : stages->number();
    Reading& reading = known.reading;
    if (known.num_threads != me.count || known.stages != number) {
      known = {me.count, number, {}, 0};
      if (stages != nullptr) stages->read_before(me, reading);
      read_layers(layers_, width_, pass.size, me, reading);
      if (stages != nullptr) {
        reading.add(final_norm_.weight, width_ * pass.size);
        stages->read_after(me, reading);
      }
      known.num_of_layers = static_cast<int64_t>(reading.stretches.size());
      if (head_) {
        if (final_norm_.weight != nullptr) reading.add(final_norm_.weight, width_ * pass.size);
        reading.add(*head_, me.share(head_->num_panels()));
      }
    }
    const Stretch* const first = reading.stretches.data();
    const int64_t count = pass.head != nullptr ? static_cast<int64_t>(reading.stretches.size())
                                               : known.num_of_layers;
    return {first, first + count, first->begin, 0, kLinesAhead};
  }

  static inline std::atomic<int64_t> num_stacks_{0};
  const int64_t number_ = ++num_stacks_;
  std::vector<Optional> tensors_;  // keeps the weights alive
  std::vector<Layer> layers_;
  Norm final_norm_;
  std::optional<Product> head_;
  const char* head_divisors_ = nullptr;
  std::optional<Tensor> embedding_;
  int64_t width_;
  at::ScalarType dtype_;
  std::mutex mutex_;
  std::vector<std::pair<const Layer*, std::unique_ptr<AttentionWork>>> works_;
  std::vector<KnownReading> readings_;  // of each thread
  Scratch inputs_, scales_, heads_, seen_, gate_up_, gated_, gain_, memory_;
};

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.class_<StackPages>("StackPages");
  m.class_<Stack>("Stack")
      .def(torch::init<std::vector<std::optional<Tensor>>, std::vector<double>,
                       c10::List<std::optional<Tensor>>, std::vector<int64_t>,
                       std::vector<int64_t>, std::vector<double>, std::optional<Tensor>, double,
                       c10::List<std::optional<Tensor>>, int64_t, std::optional<Tensor>,
                       std::optional<Tensor>>())
      .def("bind", &Stack::bind)
      .def("forward", &Stack::forward)
      .def("decode", &Stack::decode);
  define_draft_round(m);
}

}  // namespace dspark
