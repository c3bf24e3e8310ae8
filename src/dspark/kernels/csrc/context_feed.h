// Taps to keys and values of a drafter's context, written into its pages: fc, norm, then for each
// layer the joined product of keys and values, the norm of each key's heads, the rotation.
#pragma once

#include <optional>
#include <vector>

#include "worker.h"

namespace dspark {

template <class T>
const T* values_of(const Tensor& x, int64_t size, const char* name) {
  TORCH_CHECK(x.is_contiguous() && x.numel() == size, name, " must be ", size,
              " contiguous values, got ", x.sizes());
  return x.const_data_ptr<T>();
}

class ContextFeed {
 public:
  // projections: four parts of fc, then of each layer's product
  // norms: after fc, then of the keys of each layer
  ContextFeed(const c10::List<std::optional<Tensor>>& projections, std::vector<Tensor> norms,
              double eps, std::vector<Tensor> k_pages, std::vector<Tensor> v_pages)
      : norms_(std::move(norms)),
        k_pages_(std::move(k_pages)),
        v_pages_(std::move(v_pages)),
        eps_(static_cast<float>(eps)) {
    const size_t num_layers = k_pages_.size();
    TORCH_CHECK(num_layers > 0 && v_pages_.size() == num_layers &&
                    norms_.size() == num_layers + 1 && projections.size() == 4 * norms_.size(),
                "a context takes one projection and one norm more than it has layers");
    dtype_ = norms_[0].scalar_type();
    type_ = type_of(norms_[0]);
    width_ = norms_[0].numel();
    num_heads_ = k_pages_[0].size(1);
    page_size_ = k_pages_[0].size(2);
    head_dim_ = k_pages_[0].size(3);
    for (size_t i = 0; i < num_layers; ++i)
      for (const Tensor& pages : {k_pages_[i], v_pages_[i]}) {
        TORCH_CHECK(pages.sizes() == k_pages_[0].sizes() && pages.stride(3) == 1 &&
                        pages.scalar_type() == dtype_,
                    "pages must share the shape and the dtype of the taps");
        pages_.push_back({mutable_bytes(pages), {pages.stride(0), pages.stride(1), pages.stride(2)}});
      }
    for (size_t i = 0; i < norms_.size(); ++i)
      TORCH_CHECK(norms_[i].scalar_type() == dtype_ && norms_[i].is_contiguous() &&
                  norms_[i].numel() == (i == 0 ? width_ : head_dim_));
    for (const auto& part : projections) parts_.push_back(part);
    const Tensor& fc = *parts_[0];
    TORCH_CHECK(fc.dim() == 2, "a packed weight has two dimensions, got ", fc.sizes());
    fc_ = product_of(projections, 0, fc.size(1), width_, dtype_);
    for (size_t i = 0; i < num_layers; ++i) {
      products_.push_back(product_of(projections, static_cast<int64_t>(i) + 1, width_,
                                     2 * num_heads_ * head_dim_, dtype_));
      TORCH_CHECK(products_.back().weights == products_.front().weights);
    }
    from_taps_ = Operand(fc_, 0);
    context_ = Operand(products_[0], 0);
  }

  // The tokens of the next run, in parts; they are used in place.
  void take(const std::vector<Tensor>& taps, const std::vector<Tensor>& positions,
            const std::vector<Tensor>& places, const Tensor& cos, const Tensor& sin) {
    TORCH_CHECK(cos.dim() == 2 && cos.size(1) == head_dim_ && cos.sizes() == sin.sizes() &&
                    cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat &&
                    cos.is_contiguous() && sin.is_contiguous(),
                "cos and sin must be float32 tables of ", head_dim_, " columns");
    TORCH_CHECK(positions.size() == taps.size() && places.size() == taps.size());
    cos_ = bytes(cos);
    sin_ = bytes(sin);
    tokens_.clear();
    const int64_t per_unit = fc_.weights == Weights::kInt8 ? 4 : 4 / size_of(type_);
    for (size_t i = 0; i < taps.size(); ++i) {
      const Tensor& x = taps[i];
      TORCH_CHECK(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1) &&
                      x.scalar_type() == dtype_ &&
                      ceil_div(x.size(1), per_unit) == fc_.num_units,
                  "taps of ", x.sizes(), " and type ", x.scalar_type(),
                  " do not fit the projection");
      num_taps_ = x.size(1);
      const int64_t* position = values_of<int64_t>(positions[i], x.size(0), "positions_N");
      const int64_t* place = values_of<int64_t>(places[i], x.size(0), "slots_N");
      for (int64_t n = 0; n < x.size(0); ++n) {
        TORCH_CHECK(position[n] >= 0 && position[n] < cos.size(0), "position ", position[n],
                    " is beyond the tables");
        TORCH_CHECK(place[n] >= 0 && place[n] < k_pages_[0].size(0) * page_size_, "place ",
                    place[n], " is in no page");
        tokens_.push_back({bytes(x) + n * x.stride(0) * size_of(type_), position[n], place[n]});
      }
    }
    from_taps_.grow(num_tokens());
    context_.grow(num_tokens());
    grow(projected_, num_tokens() * row_bytes());
    grow(normed_, num_tokens() * row_bytes());
    grow(keys_values_, static_cast<int64_t>(products_.size()) * num_tokens() * kv_bytes());
  }

  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }

  // In the order in which a thread reads; nothing if there are no tokens.
  void read(const Worker& me, Reading& reading) const {
    reading.add(fc_, me.share(fc_.num_panels()));
    reading.add(norms_[0].const_data_ptr(), row_bytes());
    each_product(me, [&](size_t i, Share panels) { reading.add(products_[i], panels); });
  }

  // All threads of a region call it; who reads the pages meets the others before.
  void run(const Kernels& k, const Worker& me) {
    if (num_tokens() == 0) return;
    const Share rows = me.share(num_tokens());
    for (int64_t n = rows.begin; n < rows.end; ++n)
      from_taps_.set(k, type_, n, tokens_[static_cast<size_t>(n)].tap, num_taps_);
    me.meet();
    multiply(k, fc_, from_taps_, num_tokens(), type_, projected_.data(),
             me.share(fc_.num_panels()), me);
    me.meet();
    for (int64_t n = rows.begin; n < rows.end; ++n) {
      char* const row = normed_.data() + n * row_bytes();
      k.rms_norm(type_, projected_.data() + n * row_bytes(), bytes(norms_[0]), row, width_, eps_);
      context_.set(k, type_, n, row, width_);
    }
    me.stream.ahead -= num_lines(norms_[0].const_data_ptr(), row_bytes());
    me.meet();
    each_product(me, [&](size_t i, Share panels) {
      multiply(k, products_[i], context_, num_tokens(), type_, outputs(i, 0), panels, me);
      if (!has_whole_heads()) return;
      const int64_t num_panels = head_dim_ / kPanelOutputs;
      for (int64_t n = 0; n < num_tokens(); ++n)
        for (int64_t head = panels.begin / num_panels; head < panels.end / num_panels; ++head)
          place(k, i, n, head);
    });
    if (has_whole_heads()) return;
    me.meet();
    for (size_t i = 0; i < products_.size(); ++i)
      for (int64_t n = rows.begin; n < rows.end; ++n)
        for (int64_t head = 0; head < 2 * num_heads_; ++head) place(k, i, n, head);
  }

 private:
  struct Pages {
    char* data;
    int64_t strides[3];
  };
  struct Token {
    const char* tap;
    int64_t position, place;
  };

  static void grow(std::vector<char>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(static_cast<size_t>(size));
  }
  int64_t row_bytes() const { return width_ * size_of(type_); }
  int64_t kv_bytes() const { return 2 * num_heads_ * head_dim_ * size_of(type_); }
  // Whether a head is whole panels: a thread then goes on with what it has multiplied itself.
  bool has_whole_heads() const { return head_dim_ % kPanelOutputs == 0; }
  char* outputs(size_t layer, int64_t n) {
    return keys_values_.data() +
           (static_cast<int64_t>(layer) * num_tokens() + n) * kv_bytes();
  }

  // f(layer, panels of its product) for a thread's share of all heads, or of all panels.
  template <class F>
  void each_product(const Worker& me, const F& f) const {
    const int64_t step = has_whole_heads() ? head_dim_ / kPanelOutputs : 1;
    const int64_t num_steps = products_[0].num_panels() / step;
    const Share all = me.share(static_cast<int64_t>(products_.size()) * num_steps);
    for (size_t i = 0; i < products_.size(); ++i) {
      const int64_t first = static_cast<int64_t>(i) * num_steps;
      const Share own = {std::max(all.begin - first, int64_t{0}) * step,
                         std::min(all.end - first, num_steps) * step};
      if (own.begin < own.end) f(i, own);
    }
  }

  // A head of keys, in place, or of values into its page.
  void place(const Kernels& k, size_t layer, int64_t n, int64_t head) {
    const Token& token = tokens_[static_cast<size_t>(n)];
    const int64_t size = size_of(type_), head_bytes = head_dim_ * size;
    char* const row = outputs(layer, n) + head * head_bytes;
    const bool is_key = head < num_heads_;
    if (is_key) {
      k.rms_norm(type_, row, bytes(norms_[layer + 1]), row, head_dim_, eps_);
      k.rotate(type_, row, Type::kFloat32, cos_ + token.position * head_dim_ * 4,
               sin_ + token.position * head_dim_ * 4, head_dim_);
    }
    const Pages& pages = pages_[2 * layer + (is_key ? 0 : 1)];
    const int64_t at = token.place / page_size_ * pages.strides[0] +
                       (is_key ? head : head - num_heads_) * pages.strides[1] +
                       token.place % page_size_ * pages.strides[2];
    memcpy(pages.data + at * size, row, static_cast<size_t>(head_bytes));
  }

  std::vector<std::optional<Tensor>> parts_;  // keeps the weights alive
  std::vector<Tensor> norms_, k_pages_, v_pages_;
  std::vector<Pages> pages_;  // of keys and of values in turn
  float eps_;
  at::ScalarType dtype_;
  Type type_;
  int64_t width_, num_heads_, page_size_, head_dim_, num_taps_ = 0;
  Product fc_;
  std::vector<Product> products_;
  const char* cos_ = nullptr;
  const char* sin_ = nullptr;
  std::vector<Token> tokens_;
  Operand from_taps_, context_;
  std::vector<char> projected_, normed_, keys_values_;
};

}  // namespace dspark
