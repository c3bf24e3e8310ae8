// The sequential head in a walk: what its W2 is applied to in a slot, from the token before.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <vector>

#include "worker.h"

namespace dspark {

// Numbered as dspark.kernels.draft.HEAD_KINDS.
enum class HeadKind : int64_t { kVanilla = 0, kGated = 1, kRnn = 2 };

struct SequentialHead {
  HeadKind kind;
  Type type;
  int64_t num_rows, rank, width;
  const char* w1;  // [V][rank]
  // Gated: of [hidden; e] to the gate. Rnn: of [state; e; hidden] to gate, candidate and output.
  Product joint;

  int64_t size() const { return type == Type::kBFloat16 ? 2 : 4; }
  int64_t num_inputs() const { return width + rank * (kind == HeadKind::kRnn ? 2 : 1); }
  int64_t num_outputs() const { return rank * (kind == HeadKind::kRnn ? 3 : 1); }
  const char* embedding(int64_t token) const { return w1 + token * rank * size(); }
};

// One worker's copy of all rows' features; only the joint product is shared out.
class Features {
 public:
  Features(const SequentialHead& head)
      : h_(head), features_(bytes_of(head.rank)), states_(bytes_of(head.rank)) {
    if (head.kind == HeadKind::kVanilla) return;
    input_.resize(static_cast<size_t>(head.num_inputs() * head.size()));
    inputs_.emplace_back(head.joint, head.num_rows);
  }

  // Of the slot whose hidden states are hidden(r); `joined` is memory that the workers share, for
  // num_outputs values of each row. All workers call it together.
  template <class Hidden>
  void step(const Kernels& k, const std::vector<int64_t>& previous, const Hidden& hidden,
            char* joined, const Worker& me, bool is_first) {
    const size_t row = static_cast<size_t>(h_.rank * h_.size());
    if (h_.kind == HeadKind::kVanilla) {
      for (int64_t r = 0; r < h_.num_rows; ++r)
        memcpy(feature(r), h_.embedding(previous[static_cast<size_t>(r)]), row);
      return;
    }
    const size_t wide = static_cast<size_t>(h_.width * h_.size());
    for (int64_t r = 0; r < h_.num_rows; ++r) {
      const char* const e = h_.embedding(previous[static_cast<size_t>(r)]);
      char* const to = input_.data();
      if (h_.kind == HeadKind::kGated) {
        memcpy(to, hidden(r), wide);
        memcpy(to + wide, e, row);
      } else {
        memcpy(to, state(r), row);
        memcpy(to + row, e, row);
        memcpy(to + 2 * row, hidden(r), wide);
      }
      inputs_[0].set(k, h_.type, r, to, h_.num_inputs());
    }
    multiply(k, h_.joint, inputs_[0], h_.num_rows, h_.type, joined,
             me.share(h_.joint.num_panels()), me, is_first);
    me.meet();
    for (int64_t r = 0; r < h_.num_rows; ++r) {
      const char* const e = h_.embedding(previous[static_cast<size_t>(r)]);
      const char* const joint = joined + r * h_.num_outputs() * h_.size();
      if (h_.type == Type::kBFloat16) finish<c10::BFloat16>(r, e, joint);
      else finish<float>(r, e, joint);
    }
  }

  char* feature(int64_t r) { return features_.data() + r * h_.rank * h_.size(); }

 private:
  size_t bytes_of(int64_t values) const {
    return static_cast<size_t>(h_.num_rows * values * h_.size());
  }
  char* state(int64_t r) { return states_.data() + r * h_.rank * h_.size(); }

  // Every result is rounded to T, as the operators of dspark.models.heads do.
  template <class T>
  void finish(int64_t r, const char* embedded, const char* joint) {
    const T* const e = reinterpret_cast<const T*>(embedded);
    const T* const x = reinterpret_cast<const T*>(joint);
    T* const out = reinterpret_cast<T*>(feature(r));
    T* const s = reinterpret_cast<T*>(state(r));
    const auto rounded = [](float y) { return static_cast<float>(static_cast<T>(y)); };
    for (int64_t i = 0; i < h_.rank; ++i) {
      const float gate = rounded(1.0f / (1.0f + std::exp(-static_cast<float>(x[i]))));
      if (h_.kind == HeadKind::kGated) {
        out[i] = static_cast<T>(gate * static_cast<float>(e[i]));
        continue;
      }
      const float candidate = rounded(std::tanh(static_cast<float>(x[h_.rank + i])));
      const float kept = rounded(gate * static_cast<float>(s[i]));
      out[i] = static_cast<T>(std::tanh(static_cast<float>(x[2 * h_.rank + i])));
      s[i] = static_cast<T>(kept + rounded(rounded(1.0f - gate) * candidate));
    }
  }

  const SequentialHead& h_;
  std::vector<char> features_, states_, input_;  // states start as zeros
  std::vector<Operand> inputs_;                   // one, or none without a joint product
};

}  // namespace dspark
