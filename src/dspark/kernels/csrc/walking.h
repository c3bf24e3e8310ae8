// The walk over a block: base logits, then token after token (Eq. 4).
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "cells.h"
#include "rounds.h"
#include "sequential.h"

namespace dspark {

// Everything that the walk over a block reads and writes; letters as in dspark.core.
struct Walk {
  Type type;
  int64_t num_rows, block_size, width, num_columns;
  const char* hidden;  // [R][K][D]
  Product head;
  std::optional<Product> w2;  // without a sequential head: none
  SequentialHead sequential;
  // Weights of hidden, of the token before if `reads_token`, bias. Null without the head: then
  // the odds of the best column stand in for it.
  const float* confidence;
  bool reads_token;
  Rounds rounds;
  const int64_t* d2t;   // null: columns are target ids
  int64_t num_ids;      // target ids are below it
  int64_t* tokens;      // [R][K]
  float* probs;         // [R][K][S], of maximal rows
  float* confidences;   // [R][K]
  Cells forbidden;      // of rows [R][K]
};

// The weights of a walk; the rest is zero.
//   head: four parts of the LM head; w2, joint: those of the sequential head, or nothing
inline Walk walk_of(at::ScalarType dtype, int64_t width,
                    const c10::List<std::optional<Tensor>>& head, int64_t num_columns,
                    const std::optional<Tensor>& w1,
                    const c10::List<std::optional<Tensor>>& w2, int64_t kind,
                    const c10::List<std::optional<Tensor>>& joint,
                    const std::optional<Tensor>& confidence, const std::optional<Tensor>& d2t) {
  TORCH_CHECK(num_columns > 0, "a head has ", num_columns, " columns");
  Walk a = {};
  a.type = dtype == at::kBFloat16 ? Type::kBFloat16 : Type::kFloat32;
  a.width = width;
  a.num_columns = num_columns;
  a.head = product_of(head, 0, width, num_columns, dtype);
  if (w1.has_value()) {
    TORCH_CHECK(w1->dim() == 2 && w1->is_contiguous() && w1->scalar_type() == dtype);
    SequentialHead& h = a.sequential;
    TORCH_CHECK(kind >= 0 && kind <= 2, "there is no sequential head of kind ", kind);
    h.kind = static_cast<HeadKind>(kind);
    h.type = a.type;
    h.rank = w1->size(1);
    h.width = width;
    h.w1 = bytes(*w1);
    if (h.kind != HeadKind::kVanilla)
      h.joint = product_of(joint, 0, h.num_inputs(), h.num_outputs(), dtype);
    a.w2 = product_of(w2, 0, h.rank, num_columns, dtype);
  }
  if (d2t.has_value()) a.d2t = contiguous_data<int64_t>(*d2t, num_columns, "d2t");
  a.num_ids = w1.has_value() ? w1->size(0) : INT64_MAX;
  if (confidence.has_value()) {
    a.reads_token = confidence->numel() != width + 1;
    TORCH_CHECK(!a.reads_token || w1.has_value());
    a.confidence = contiguous_data<float>(
        *confidence, width + (a.reads_token ? a.sequential.rank : 0) + 1, "confidence");
  }
  return a;
}

// The requests of the next run, and memory for what it finds.
inline void set_rounds(Walk& a, const Rounds& rounds, int64_t block_size, const Tensor& tokens,
                       const Tensor& confidences, const std::optional<Tensor>& probs) {
  if (a.w2)
    for (int64_t r = 0; r < rounds.size; ++r)
      TORCH_CHECK(rounds.anchors[r] >= 0 && rounds.anchors[r] < a.num_ids, "anchor ",
                  rounds.anchors[r], " is no token");
  TORCH_CHECK(probs.has_value() || !rounds.has(DrawKind::kMaximal),
              "maximal coupling needs memory for probabilities");
  a.rounds = rounds;
  a.num_rows = a.sequential.num_rows = rounds.size;
  a.block_size = block_size;
  a.tokens = tokens.mutable_data_ptr<int64_t>();
  a.confidences = confidences.mutable_data_ptr<float>();
  a.probs = nullptr;
  if (!probs.has_value()) return;
  const int64_t size = rounds.size * block_size * a.num_columns;
  TORCH_CHECK(probs->is_contiguous() && probs->numel() == size, "probs must be ", size,
              " contiguous values, got ", probs->sizes());
  a.probs = probs->mutable_data_ptr<float>();
}

// A worker's own columns, whole blocks of them, and its copy of what was drawn.
struct Walker {
  const Worker& me;
  Share blocks;
  int64_t column_begin, column_end;
  std::vector<int64_t> previous;  // [R] target ids
  std::vector<float> exponentials;  // of one block
};

// Base logits of all slots in one product, then slot by slot: the bias of what was drawn before,
// the draw, by all workers at once. Every worker comes to the same tokens by itself.
// One object serves call after call and keeps its memory.
class Walking {
 public:
  // Of the next run; `walk` stays in use.
  void take(const Walk& walk) {
    a_ = &walk;
    size_ = size_of(walk.type);
    num_blocks_ = num_blocks(walk.num_columns);
    hidden_.fit(walk.head, walk.num_rows * walk.block_size);
    base_ = memory_[0].get(walk.num_rows * walk.block_size * walk.num_columns * size_);
    if (walk.w2) {
      biased_ = memory_[1].get(walk.num_rows * walk.num_columns * size_);
      joined_ = memory_[2].get(walk.num_rows * walk.sequential.num_outputs() * size_);
    }
    is_filtered_.resize(static_cast<size_t>(walk.num_rows));
    has_filters_ = false;
    for (int64_t r = 0; r < walk.num_rows; ++r) {
      const bool is_filtered = !walk.rounds.filter(r).keeps_all();
      is_filtered_[static_cast<size_t>(r)] = is_filtered;
      has_filters_ = has_filters_ || is_filtered;
    }
    if (has_filters_)
      filtered_ = reinterpret_cast<float*>(memory_[3].get(walk.num_rows * walk.num_columns * 4));
    has_shared_ = walk.rounds.has(DrawKind::kShared);
    has_maximal_ = walk.rounds.has(DrawKind::kMaximal);
    const size_t cells = static_cast<size_t>(walk.num_rows * at::get_num_threads());
    const size_t sums = has_maximal_ ? static_cast<size_t>(walk.num_rows * num_blocks_) : 0;
    for (Slot& slot : slots_) {
      slot.bests.resize(cells);
      slot.draws.resize(cells);
      slot.totals.resize(sums);
      slot.sums.resize(sums);
    }
    if (walk.confidence == nullptr)
      weights_.resize(static_cast<size_t>(walk.num_rows * walk.block_size * num_blocks_));
    unknown_token_ = 0;
  }

  // In the order in which a worker reads.
  static void read(const Walk& walk, const Worker& me, Reading& reading) {
    reading.add(walk.head, own_panels(walk, walk.head, me));
    if (!walk.w2) return;
    const Product& joint = walk.sequential.joint;
    if (walk.sequential.kind != HeadKind::kVanilla)
      reading.add(joint, me.share(joint.num_panels()));
    reading.add(*walk.w2, own_panels(walk, *walk.w2, me));
  }

  // Whether all scores were finite. A worker's share of the rows of `hidden` is its own before.
  bool run(const Kernels& k, const Worker& me) {
    Walker w = {me, me.share(num_blocks_), 0, 0, {}, {}};
    w.column_begin = std::min(w.blocks.begin * kBlock, a_->num_columns);
    w.column_end = std::min(w.blocks.end * kBlock, a_->num_columns);
    w.previous.assign(a_->rounds.anchors, a_->rounds.anchors + a_->num_rows);
    if (a_->confidence == nullptr) w.exponentials.resize(static_cast<size_t>(kBlock));
    const int64_t num_hidden = a_->num_rows * a_->block_size;
    const Share rows = me.share(num_hidden);
    for (int64_t n = rows.begin; n < rows.end; ++n)
      hidden_.set(k, a_->type, n, hidden(n), a_->width);
    me.meet();
    multiply(k, a_->head, hidden_, num_hidden, a_->type, base_, own_panels(*a_, a_->head, me), me);
    std::optional<Operand> operand;
    std::optional<Features> features;
    if (a_->w2) {
      operand.emplace(*a_->w2, a_->num_rows);
      features.emplace(a_->sequential);
    }
    bool is_finite = true;
    for (int64_t j = 0; j < a_->block_size; ++j) {
      if (a_->w2) {
        const auto own_hidden = [&](int64_t r) { return hidden(r * a_->block_size + j); };
        features->step(k, w.previous, own_hidden, joined_, me, j == 0);
        for (int64_t r = 0; r < a_->num_rows; ++r)
          operand->set(k, a_->type, r, features->feature(r), a_->sequential.rank);
        multiply(k, *a_->w2, *operand, a_->num_rows, a_->type, biased_,
                 own_panels(*a_, *a_->w2, me), me, j == 0);
      }
      if (a_->confidence != nullptr) tell_confidence(k, w, j);
      is_finite = draw(k, w, j) && is_finite;
    }
    if (a_->confidence == nullptr) {
      me.meet();
      tell_odds(me);
    }
    return is_finite;
  }

  // A drawn token that is none of the target's, 0 if there was none.
  int64_t unknown_token() const { return unknown_token_; }

 private:
  // What the workers tell each other about one slot.
  struct Slot {
    std::vector<Best> bests;     // [worker][R]
    std::vector<Draw> draws;     // [worker][R]
    std::vector<double> totals;  // [R][block], of exponentials
    std::vector<double> sums;    // [R][block], of probabilities
  };

  const char* hidden(int64_t n) const { return a_->hidden + n * a_->width * size_; }
  const char* embedding(const Walker& w, int64_t r) const {
    return a_->sequential.embedding(w.previous[static_cast<size_t>(r)]);
  }
  float* probs(int64_t r, int64_t j) const {
    return a_->probs + (r * a_->block_size + j) * a_->num_columns;
  }
  char* base(int64_t r, int64_t j) const {
    return base_ + (r * a_->block_size + j) * a_->num_columns * size_;
  }
  float* filtered(int64_t r) const { return filtered_ + r * a_->num_columns; }
  // Logits of a request in slot j; each worker reads its own columns alone, unless it filters.
  char* logits(int64_t r, int64_t j) const {
    return a_->w2 ? biased_ + r * a_->num_columns * size_ : base(r, j);
  }
  Scores scores(int64_t r, int64_t j, float shift) const {
    return {a_->type, logits(r, j), shift, a_->rounds.temperature(r)};
  }

  static Share own_panels(const Walk& walk, const Product& product, const Worker& me) {
    constexpr int64_t kPanelsPerBlock = kBlock / kPanelOutputs;
    const Share blocks = me.share(num_blocks(walk.num_columns));
    return {blocks.begin * kPanelsPerBlock,
            std::min(blocks.end * kPanelsPerBlock, product.num_panels())};
  }

  // Eq. 7 as a logit, for a share of the requests.
  void tell_confidence(const Kernels& k, const Walker& w, int64_t j) const {
    const Share rows = w.me.share(a_->num_rows);
    const float bias = a_->confidence[a_->width + (a_->reads_token ? a_->sequential.rank : 0)];
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t n = r * a_->block_size + j;
      float logit = k.dot(a_->type, hidden(n), a_->confidence, a_->width) + bias;
      if (a_->reads_token)
        logit += k.dot(a_->type, embedding(w, r), a_->confidence + a_->width,
                       a_->sequential.rank);
      a_->confidences[n] = logit;
    }
  }

  double* weights(int64_t n) { return weights_.data() + n * num_blocks_; }

  // Exponentials of a row's own columns over that of its best, at temperature 1.
  void weigh_others(const Kernels& k, Walker& w, int64_t r, int64_t j, float best) {
    for (int64_t b = w.blocks.begin; b < w.blocks.end; ++b) {
      const int64_t begin = b * kBlock, width = std::min(kBlock, a_->num_columns - begin);
      const Scores block = {a_->type, logits(r, j) + begin * size_, best, 1.0f};
      weights(r * a_->block_size + j)[b] =
          static_cast<double>(k.exponential_block(block, 0, width, w.exponentials.data()));
    }
  }

  // `log_odds_of_best` of dspark.algorithms.confidence, for a share of the slots.
  void tell_odds(const Worker& me) {
    const Share slots = me.share(a_->num_rows * a_->block_size);
    for (int64_t n = slots.begin; n < slots.end; ++n) {
      const double others = sum_in_order(weights(n), num_blocks_) - 1.0;
      a_->confidences[n] = static_cast<float>(-std::log(std::max(others, 1e-6)));
    }
  }

  bool draw(const Kernels& k, Walker& w, int64_t j) {
    Slot& slot = slots_[j % 2];  // a slow worker may still read the slot before
    const int64_t num_own = w.column_end - w.column_begin;
    for (int64_t r = 0; r < a_->num_rows; ++r) {
      const int64_t first = w.column_begin * size_;
      if (a_->w2)
        k.add_row(a_->type, base(r, j) + first,
                   biased_ + r * a_->num_columns * size_ + first, num_own);
      a_->forbidden.forbid(a_->type, r * a_->block_size + j, logits(r, j), w.column_begin,
                           w.column_end);
      Best best = k.best(a_->type, logits(r, j) + first, num_own);
      best.column += w.column_begin;
      slot.bests[static_cast<size_t>(w.me.number * a_->num_rows + r)] = best;
    }
    w.me.meet();
    std::vector<Best> bests(static_cast<size_t>(a_->num_rows));
    bool is_finite = true;
    for (int64_t r = 0; r < a_->num_rows; ++r) {
      const Best best = best_of(w, slot, r);
      is_finite = is_finite && !best.has_nan && std::isfinite(best.value);
      bests[static_cast<size_t>(r)] = best;
    }
    if (!is_finite) bests.assign(bests.size(), {0.0f, 0, false});
    if (a_->confidence == nullptr)
      for (int64_t r = 0; r < a_->num_rows; ++r)
        weigh_others(k, w, r, j, bests[static_cast<size_t>(r)].value);
    if (has_filters_ && is_finite) filter(k, w, j, bests);
    if (has_shared_ || has_maximal_) weigh(k, w, j, slot, bests, is_finite);
    for (int64_t r = 0; r < a_->num_rows; ++r) {
      const int64_t column = column_of(w, j, slot, r, bests[static_cast<size_t>(r)]);
      int64_t token = a_->d2t == nullptr ? column : a_->d2t[column];
      if (token < 0 || token >= a_->num_ids) {  // every worker sees it, none reads its embedding
        if (w.me.number == 0) unknown_token_ = token;
        token = 0;
      }
      w.previous[static_cast<size_t>(r)] = token;
      if (w.me.number == 0) a_->tokens[r * a_->block_size + j] = token;
    }
    return is_finite;
  }

  Best best_of(const Walker& w, const Slot& slot, int64_t r) const {
    Best best = {-INFINITY, 0, false};
    bool is_first = true;
    for (int64_t i = 0; i < w.me.count; ++i) {
      const Share own = w.me.share_of(i, num_blocks_);
      if (own.begin == own.end) continue;
      const Best other = slot.bests[static_cast<size_t>(i * a_->num_rows + r)];
      const bool has_nan = best.has_nan || other.has_nan;
      if (is_first || other.value > best.value) best = other;
      best.has_nan = has_nan;
      is_first = false;
    }
    return best;
  }

  // Whole rows, one worker each: what a filter keeps follows from all columns.
  void filter(const Kernels& k, const Walker& w, int64_t j, const std::vector<Best>& bests) {
    for (int64_t r = w.me.number; r < a_->num_rows; r += w.me.count) {
      if (!is_filtered_[static_cast<size_t>(r)]) continue;
      k.score_row(scores(r, j, bests[static_cast<size_t>(r)].value), a_->num_columns, filtered(r));
      own_row_filter().apply(k, filtered(r), a_->num_columns, a_->rounds.filter(r));
    }
    w.me.meet();
  }

  // Own columns of the rows that are drawn at random: the best after noise, or probabilities.
  void weigh(const Kernels& k, const Walker& w, int64_t j, Slot& slot,
             const std::vector<Best>& bests, bool is_finite) {
    for (int64_t r = 0; r < a_->num_rows; ++r) {
      const bool is_filtered = is_finite && is_filtered_[static_cast<size_t>(r)];
      const Scores row =
          is_filtered
              ? Scores{Type::kFloat32, reinterpret_cast<const char*>(filtered(r)), 0.0f, 1.0f}
              : scores(r, j, bests[static_cast<size_t>(r)].value);
      if (a_->rounds.kind(r) == DrawKind::kShared)
        slot.draws[static_cast<size_t>(w.me.number * a_->num_rows + r)] =
            k.shared_draw(row, w.column_begin, w.column_end, a_->rounds.shared_key(r, j), a_->d2t);
      if (a_->rounds.kind(r) == DrawKind::kMaximal)
        for (int64_t b = w.blocks.begin; b < w.blocks.end; ++b)
          slot.totals[static_cast<size_t>(r * num_blocks_ + b)] =
              static_cast<double>(k.exponential_block(
                  row, b * kBlock, std::min((b + 1) * kBlock, a_->num_columns), probs(r, j)));
    }
    w.me.meet();
    if (!has_maximal_) return;
    for (int64_t r = 0; r < a_->num_rows; ++r) {
      if (a_->rounds.kind(r) != DrawKind::kMaximal) continue;
      const float total = static_cast<float>(
          sum_in_order(slot.totals.data() + r * num_blocks_, num_blocks_));
      for (int64_t b = w.blocks.begin; b < w.blocks.end; ++b) {
        float* const block = probs(r, j) + b * kBlock;
        const int64_t width = std::min(kBlock, a_->num_columns - b * kBlock);
        k.divide(block, width, total);
        slot.sums[static_cast<size_t>(r * num_blocks_ + b)] = k.block_sum(block, width);
      }
    }
    w.me.meet();
  }

  int64_t column_of(const Walker& w, int64_t j, const Slot& slot, int64_t r,
                    const Best& best) const {
    switch (a_->rounds.kind(r)) {
      case DrawKind::kGreedy:
        return best.column;
      case DrawKind::kShared: {
        Draw drawn = {-INFINITY, 0};
        for (int64_t i = 0; i < w.me.count; ++i) {
          const Draw other = slot.draws[static_cast<size_t>(i * a_->num_rows + r)];
          if (other.score > drawn.score) drawn = other;
        }
        return drawn.column;
      }
      case DrawKind::kMaximal:
        return draw_column(probs(r, j), a_->num_columns, slot.sums.data() + r * num_blocks_,
                           a_->rounds.uniform(r, j, Stream::kDraft));
    }
    return 0;
  }

  const Walk* a_ = nullptr;
  int64_t size_ = 0, num_blocks_ = 0;
  Operand hidden_;
  Scratch memory_[4];
  char* base_ = nullptr;    // [R][K][S]
  char* biased_ = nullptr;  // [R][S], of the slot at hand
  char* joined_ = nullptr;  // [R][outputs of the head's joint product], of the slot at hand
  float* filtered_ = nullptr;  // scores [R][S] of rows with a filter, of the slot at hand
  std::vector<char> is_filtered_;  // [R]
  bool has_filters_ = false, has_shared_ = false, has_maximal_ = false;
  Slot slots_[2];
  std::vector<double> weights_;  // [R][K][block], of exponentials, without a confidence head
  int64_t unknown_token_ = 0;  // of the first worker
};

}  // namespace dspark
