// The drafter around its backbone: what a step leaves in its context, and the walk over a block.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "product.h"
#include "rounds.h"
#include "sequential.h"
#include "team.h"

namespace dspark {
namespace {

int64_t size_of(Type type) { return type == Type::kBFloat16 ? 2 : 4; }

// [begin, end) of `count` things for one of the workers.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int64_t worker, int64_t num_workers)
      : begin(count * worker / num_workers), end(count * (worker + 1) / num_workers) {}
};

template <class T>
const T* values_of(const Tensor& x, int64_t size, const char* name) {
  TORCH_CHECK(x.is_contiguous() && x.numel() == size, name, " must be ", size,
              " contiguous values, got ", x.sizes());
  return x.const_data_ptr<T>();
}

// Taps to keys and values of the drafter's context, written into its pages: fc, norm, then for
// each layer the joined product of keys and values, the norm of each key's heads, the rotation.
//   projections: four parts of fc, then of each layer's product
//   norms: after fc, then of the keys of each layer
void feed_context(const Tensor& taps, const c10::List<std::optional<Tensor>>& projections,
                  at::TensorList norms, double eps, at::TensorList k_pages,
                  at::TensorList v_pages, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const Tensor& places) {
  const int64_t num_layers = static_cast<int64_t>(k_pages.size());
  TORCH_CHECK(taps.dim() == 2 && (taps.size(1) <= 1 || taps.stride(1) == 1) && num_layers > 0 &&
                  v_pages.size() == k_pages.size() && norms.size() == k_pages.size() + 1 &&
                  projections.size() == 4 * norms.size(),
              "feed_context takes one projection and one norm more than it has layers");
  const Type type = type_of(taps);
  const int64_t num_tokens = taps.size(0), num_taps = taps.size(1), width = norms[0].numel();
  const int64_t num_heads = k_pages[0].size(1), page_size = k_pages[0].size(2);
  const int64_t head_dim = k_pages[0].size(3), kv_width = 2 * num_heads * head_dim;
  for (int64_t i = 0; i < num_layers; ++i)
    for (const Tensor& pages : {k_pages[i], v_pages[i]})
      TORCH_CHECK(pages.sizes() == k_pages[0].sizes() && pages.stride(3) == 1 &&
                      pages.scalar_type() == taps.scalar_type(),
                  "pages must share the shape and the dtype of the taps");
  for (size_t i = 0; i < norms.size(); ++i)
    TORCH_CHECK(norms[i].scalar_type() == taps.scalar_type() && norms[i].is_contiguous() &&
                norms[i].numel() == (i == 0 ? width : head_dim));
  TORCH_CHECK(cos.dim() == 2 && cos.size(1) == head_dim && cos.sizes() == sin.sizes() &&
                  cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat &&
                  cos.is_contiguous() && sin.is_contiguous(),
              "cos and sin must be float32 tables of ", head_dim, " columns");
  const int64_t* position = values_of<int64_t>(positions, num_tokens, "positions_N");
  const int64_t* place = values_of<int64_t>(places, num_tokens, "slots_N");
  for (int64_t n = 0; n < num_tokens; ++n) {
    TORCH_CHECK(position[n] >= 0 && position[n] < cos.size(0), "position ", position[n],
                " is beyond the tables");
    TORCH_CHECK(place[n] >= 0 && place[n] < k_pages[0].size(0) * page_size, "place ", place[n],
                " is in no page");
  }
  if (num_tokens == 0) return;

  const Product fc = product_of(projections, 0, num_taps, width, taps.scalar_type());
  std::vector<Product> products;
  for (int64_t i = 0; i < num_layers; ++i) {
    products.push_back(product_of(projections, i + 1, width, kv_width, taps.scalar_type()));
    TORCH_CHECK(products.back().weights == products.front().weights);
  }
  const int64_t size = size_of(type), row_bytes = width * size, kv_bytes = kv_width * size;
  Operand from_taps(fc, num_tokens), context(products[0], num_tokens);
  std::vector<char> projected(static_cast<size_t>(num_tokens * row_bytes));
  std::vector<char> normed(projected.size());
  std::vector<char> keys_values(static_cast<size_t>(num_layers * num_tokens * kv_bytes));
  const char* tap = bytes(taps);
  const int64_t tap_bytes = taps.stride(0) * size;
  std::vector<char*> keys, values;
  for (int64_t i = 0; i < num_layers; ++i) {
    keys.push_back(mutable_bytes(k_pages[i]));
    values.push_back(mutable_bytes(v_pages[i]));
  }
  const Kernels& k = kernels();
  const float epsilon = static_cast<float>(eps);

  run_team([&](int64_t worker, int64_t num_workers, Team& team) {
    const Share rows(num_tokens, worker, num_workers);
    for (int64_t n = rows.begin; n < rows.end; ++n)
      from_taps.set(k, type, n, tap + n * tap_bytes, num_taps);
    team.wait(num_workers);
    const Share panels(fc.num_panels(), worker, num_workers);
    run_panels(k, fc, from_taps, num_tokens, type, projected.data(), panels.begin, panels.end);
    team.wait(num_workers);
    for (int64_t n = rows.begin; n < rows.end; ++n) {
      char* const row = normed.data() + n * row_bytes;
      k.rms_norm(type, projected.data() + n * row_bytes, bytes(norms[0]), row, width, epsilon);
      context.set(k, type, n, row, width);
    }
    team.wait(num_workers);
    const int64_t num_panels = products[0].num_panels();
    const Share all(num_layers * num_panels, worker, num_workers);
    for (int64_t i = 0; i < num_layers; ++i) {
      const int64_t first = std::max<int64_t>(all.begin - i * num_panels, 0);
      run_panels(k, products[static_cast<size_t>(i)], context, num_tokens, type,
                 keys_values.data() + i * num_tokens * kv_bytes, first,
                 std::min(all.end - i * num_panels, num_panels));
    }
    team.wait(num_workers);
    std::vector<char> head(static_cast<size_t>(head_dim * size));
    for (int64_t i = 0; i < num_layers; ++i) {
      const Tensor &k_page = k_pages[i], &v_page = v_pages[i];
      for (int64_t n = rows.begin; n < rows.end; ++n) {
        const char* const kv = keys_values.data() + (i * num_tokens + n) * kv_bytes;
        const int64_t page = place[n] / page_size, row = place[n] % page_size;
        for (int64_t g = 0; g < num_heads; ++g) {
          k.rms_norm(type, kv + g * head_dim * size, bytes(norms[static_cast<size_t>(i) + 1]),
                     head.data(), head_dim, epsilon);
          k.rotate(type, head.data(), Type::kFloat32,
                   bytes(cos) + position[n] * head_dim * 4,
                   bytes(sin) + position[n] * head_dim * 4, head_dim);
          const auto at = [&](const Tensor& x) {
            return (page * x.stride(0) + g * x.stride(1) + row * x.stride(2)) * size;
          };
          memcpy(keys[static_cast<size_t>(i)] + at(k_page), head.data(), head.size());
          memcpy(values[static_cast<size_t>(i)] + at(v_page),
                 kv + (num_heads + g) * head_dim * size, head.size());
        }
      }
    }
  });
}

// Embeddings of [anchor, mask, .., mask] for each request, flattened.
Tensor block_inputs(const Tensor& embeddings, const Tensor& anchors, int64_t mask_id,
                    int64_t block_size) {
  TORCH_CHECK(embeddings.dim() == 2 && embeddings.is_contiguous() && block_size > 0 &&
                  mask_id >= 0 && mask_id < embeddings.size(0),
              "embeddings must be contiguous rows, that of the mask ", mask_id, " among them, got ",
              embeddings.sizes());
  TORCH_CHECK(anchors.dim() == 1 && anchors.scalar_type() == at::kLong,
              "anchors must be a row of int64, got ", anchors.sizes());
  const int64_t num_rows = anchors.size(0), stride = anchors.stride(0);
  const int64_t* const anchor = anchors.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < num_rows; ++r)
    TORCH_CHECK(anchor[r * stride] >= 0 && anchor[r * stride] < embeddings.size(0), "anchor ",
                anchor[r * stride], " is no token");
  Tensor out = at::empty({num_rows * block_size, embeddings.size(1)}, embeddings.options());
  const size_t row_bytes = static_cast<size_t>(embeddings.size(1) * embeddings.element_size());
  const char* const from = bytes(embeddings);
  char* to = mutable_bytes(out);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t j = 0; j < block_size; ++j, to += row_bytes)
      memcpy(to, from + static_cast<size_t>(j == 0 ? anchor[r * stride] : mask_id) * row_bytes,
             row_bytes);
  return out;
}

// Everything that the walk over a block reads and writes; letters as in dspark.core.
struct Walk {
  Type type;
  int64_t num_rows, block_size, width, num_columns;
  const char* hidden;  // [R][K][D]
  Product head;
  std::optional<Product> w2;  // without a sequential head: none
  SequentialHead sequential;
  const float* confidence;  // weights of hidden, of the token before if `reads_token`, bias; null
  bool reads_token;
  Rounds rounds;
  const int64_t* d2t;   // null: columns are target ids
  int64_t num_ids;      // target ids are below it
  int64_t* tokens;      // [R][K]
  float* probs;         // [R][K][S], of maximal rows
  float* confidences;   // [R][K]
};

// A worker's own columns, whole blocks of them, and its copy of what was drawn.
struct Walker {
  int64_t worker, num_workers;
  Share blocks;
  int64_t column_begin, column_end;
  std::vector<int64_t> previous;  // [R] target ids
};

// Base logits of all slots in one product, then slot by slot: the bias of what was drawn before,
// the draw, by all workers at once. Every worker comes to the same tokens by itself.
class Walking {
 public:
  Walking(const Kernels& k, const Walk& walk)
      : k_(k),
        a_(walk),
        size_(size_of(walk.type)),
        num_blocks_(num_blocks(walk.num_columns)),
        hidden_(walk.head, walk.num_rows * walk.block_size),
        base_(memory(walk.num_rows * walk.block_size * walk.num_columns * size_)),
        biased_(memory(walk.w2 ? walk.num_rows * walk.num_columns * size_ : 0)),
        joined_(memory(walk.w2 ? walk.num_rows * walk.sequential.num_outputs() * size_ : 0)),
        has_shared_(walk.rounds.has(DrawKind::kShared)),
        has_maximal_(walk.rounds.has(DrawKind::kMaximal)) {
    const size_t cells = static_cast<size_t>(walk.num_rows * at::get_num_threads());
    const size_t sums = has_maximal_ ? static_cast<size_t>(walk.num_rows * num_blocks_) : 0;
    for (Slot& slot : slots_) {
      slot.bests.resize(cells);
      slot.draws.resize(cells);
      slot.totals.resize(sums);
      slot.sums.resize(sums);
    }
  }

  // Whether all scores were finite.
  bool run(int64_t worker, int64_t num_workers, Team& team) {
    Walker w = {worker, num_workers, Share(num_blocks_, worker, num_workers), 0, 0, {}};
    w.column_begin = std::min(w.blocks.begin * kBlock, a_.num_columns);
    w.column_end = std::min(w.blocks.end * kBlock, a_.num_columns);
    w.previous.assign(a_.rounds.anchors, a_.rounds.anchors + a_.num_rows);
    const Share rows(a_.num_rows * a_.block_size, worker, num_workers);
    for (int64_t n = rows.begin; n < rows.end; ++n)
      hidden_.set(k_, a_.type, n, hidden(n), a_.width);
    team.wait(num_workers);
    run_own_panels(a_.head, hidden_, a_.num_rows * a_.block_size, base_.get(), w);
    std::optional<Operand> operand;
    std::optional<Features> features;
    if (a_.w2) {
      operand.emplace(*a_.w2, a_.num_rows);
      features.emplace(a_.sequential);
    }
    bool is_finite = true;
    for (int64_t j = 0; j < a_.block_size; ++j) {
      if (a_.w2) {
        const auto own_hidden = [&](int64_t r) { return hidden(r * a_.block_size + j); };
        features->step(k_, w.previous, own_hidden, joined_.get(), worker, num_workers, team);
        for (int64_t r = 0; r < a_.num_rows; ++r)
          operand->set(k_, a_.type, r, features->feature(r), a_.sequential.rank);
        run_own_panels(*a_.w2, *operand, a_.num_rows, biased_.get(), w);
      }
      if (a_.confidence != nullptr) tell_confidence(w, j);
      is_finite = draw(w, j, team) && is_finite;
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

  const char* hidden(int64_t n) const { return a_.hidden + n * a_.width * size_; }
  const char* embedding(const Walker& w, int64_t r) const {
    return a_.sequential.embedding(w.previous[static_cast<size_t>(r)]);
  }
  float* probs(int64_t r, int64_t j) const {
    return a_.probs + (r * a_.block_size + j) * a_.num_columns;
  }
  const char* base(int64_t r, int64_t j) const {
    return base_.get() + (r * a_.block_size + j) * a_.num_columns * size_;
  }
  // Logits of a request in slot j; each worker reads its own columns alone.
  const char* logits(int64_t r, int64_t j) const {
    return a_.w2 ? biased_.get() + r * a_.num_columns * size_ : base(r, j);
  }
  Scores scores(int64_t r, int64_t j, float shift) const {
    return {a_.type, logits(r, j), shift, a_.rounds.temperature(r)};
  }

  void run_own_panels(const Product& product, const Operand& x, int64_t num_rows,
                      char* out, const Walker& w) const {
    constexpr int64_t kPanelsPerBlock = kBlock / (kGroup * kPanelGroups);
    run_panels(k_, product, x, num_rows, a_.type, out, w.blocks.begin * kPanelsPerBlock,
               std::min(w.blocks.end * kPanelsPerBlock, product.num_panels()));
  }

  // Eq. 7 as a logit, for a share of the requests.
  void tell_confidence(const Walker& w, int64_t j) const {
    const Share rows(a_.num_rows, w.worker, w.num_workers);
    const float bias = a_.confidence[a_.width + (a_.reads_token ? a_.sequential.rank : 0)];
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t n = r * a_.block_size + j;
      float logit = k_.dot(a_.type, hidden(n), a_.confidence, a_.width) + bias;
      if (a_.reads_token)
        logit += k_.dot(a_.type, embedding(w, r), a_.confidence + a_.width,
                       a_.sequential.rank);
      a_.confidences[n] = logit;
    }
  }

  bool draw(Walker& w, int64_t j, Team& team) {
    Slot& slot = slots_[j % 2];  // a slow worker may still read the slot before
    const int64_t num_own = w.column_end - w.column_begin;
    for (int64_t r = 0; r < a_.num_rows; ++r) {
      const int64_t first = w.column_begin * size_;
      if (a_.w2)
        k_.add_row(a_.type, base(r, j) + first,
                   biased_.get() + r * a_.num_columns * size_ + first, num_own);
      Best best = k_.best(a_.type, logits(r, j) + first, num_own);
      best.column += w.column_begin;
      slot.bests[static_cast<size_t>(w.worker * a_.num_rows + r)] = best;
    }
    team.wait(w.num_workers);
    std::vector<Best> bests(static_cast<size_t>(a_.num_rows));
    bool is_finite = true;
    for (int64_t r = 0; r < a_.num_rows; ++r) {
      const Best best = best_of(slot, r, w.num_workers);
      is_finite = is_finite && !best.has_nan && std::isfinite(best.value);
      bests[static_cast<size_t>(r)] = best;
    }
    if (!is_finite) bests.assign(bests.size(), {0.0f, 0, false});
    if (has_shared_ || has_maximal_) weigh(w, j, slot, bests, team);
    for (int64_t r = 0; r < a_.num_rows; ++r) {
      const int64_t column = column_of(w, j, slot, r, bests[static_cast<size_t>(r)]);
      int64_t token = a_.d2t == nullptr ? column : a_.d2t[column];
      if (token < 0 || token >= a_.num_ids) {  // every worker sees it, none reads its embedding
        if (w.worker == 0) unknown_token_ = token;
        token = 0;
      }
      w.previous[static_cast<size_t>(r)] = token;
      if (w.worker == 0) a_.tokens[r * a_.block_size + j] = token;
    }
    return is_finite;
  }

  Best best_of(const Slot& slot, int64_t r, int64_t num_workers) const {
    Best best = {-INFINITY, 0, false};
    bool is_first = true;
    for (int64_t i = 0; i < num_workers; ++i) {
      if (Share(num_blocks_, i, num_workers).begin == Share(num_blocks_, i, num_workers).end)
        continue;
      const Best other = slot.bests[static_cast<size_t>(i * a_.num_rows + r)];
      const bool has_nan = best.has_nan || other.has_nan;
      if (is_first || other.value > best.value) best = other;
      best.has_nan = has_nan;
      is_first = false;
    }
    return best;
  }

  // Own columns of the rows that are drawn at random: the best after noise, or probabilities.
  void weigh(const Walker& w, int64_t j, Slot& slot, const std::vector<Best>& bests, Team& team) {
    for (int64_t r = 0; r < a_.num_rows; ++r) {
      const Scores row = scores(r, j, bests[static_cast<size_t>(r)].value);
      if (a_.rounds.kind(r) == DrawKind::kShared)
        slot.draws[static_cast<size_t>(w.worker * a_.num_rows + r)] =
            k_.shared_draw(row, w.column_begin, w.column_end, a_.rounds.shared_key(r, j), a_.d2t);
      if (a_.rounds.kind(r) == DrawKind::kMaximal)
        for (int64_t b = w.blocks.begin; b < w.blocks.end; ++b)
          slot.totals[static_cast<size_t>(r * num_blocks_ + b)] =
              static_cast<double>(k_.exponential_block(
                  row, b * kBlock, std::min((b + 1) * kBlock, a_.num_columns), probs(r, j)));
    }
    team.wait(w.num_workers);
    if (!has_maximal_) return;
    for (int64_t r = 0; r < a_.num_rows; ++r) {
      if (a_.rounds.kind(r) != DrawKind::kMaximal) continue;
      const float total = static_cast<float>(
          sum_in_order(slot.totals.data() + r * num_blocks_, num_blocks_));
      for (int64_t b = w.blocks.begin; b < w.blocks.end; ++b) {
        float* const block = probs(r, j) + b * kBlock;
        const int64_t width = std::min(kBlock, a_.num_columns - b * kBlock);
        k_.divide(block, width, total);
        slot.sums[static_cast<size_t>(r * num_blocks_ + b)] = k_.block_sum(block, width);
      }
    }
    team.wait(w.num_workers);
  }

  int64_t column_of(const Walker& w, int64_t j, const Slot& slot, int64_t r,
                    const Best& best) const {
    switch (a_.rounds.kind(r)) {
      case DrawKind::kGreedy:
        return best.column;
      case DrawKind::kShared: {
        Draw drawn = {-INFINITY, 0};
        for (int64_t i = 0; i < w.num_workers; ++i) {
          const Draw other = slot.draws[static_cast<size_t>(i * a_.num_rows + r)];
          if (other.score > drawn.score) drawn = other;
        }
        return drawn.column;
      }
      case DrawKind::kMaximal:
        return draw_column(probs(r, j), a_.num_columns, slot.sums.data() + r * num_blocks_,
                           a_.rounds.uniform(r, j, Stream::kDraft));
    }
    return 0;
  }

  using Memory = std::unique_ptr<char[]>;
  static Memory memory(int64_t num_bytes) { return Memory(new char[static_cast<size_t>(num_bytes)]); }

  const Kernels& k_;
  const Walk& a_;
  const int64_t size_, num_blocks_;
  Operand hidden_;
  Memory base_;    // [R][K][S]
  Memory biased_;  // [R][S], of the slot at hand
  Memory joined_;  // [R][outputs of the head's joint product], of the slot at hand
  const bool has_shared_, has_maximal_;
  Slot slots_[2];
  int64_t unknown_token_ = 0;  // of the first worker
};

// The tokens of a block for each request, target ids [R, K], and confidence logits [R, K]; both
// are undefined if the last result says that a score was not finite.
//   head: four parts of the LM head; w2, joint: those of the sequential head, or nothing
std::tuple<Tensor, Tensor, bool> walk(
    const Tensor& hidden, int64_t block_size, const c10::List<std::optional<Tensor>>& head,
    int64_t num_columns, const std::optional<Tensor>& w1,
    const c10::List<std::optional<Tensor>>& w2, int64_t kind,
    const c10::List<std::optional<Tensor>>& joint, const std::optional<Tensor>& confidence,
    const Tensor& counters, const Tensor& temperatures, const std::optional<Tensor>& d2t,
    const std::optional<Tensor>& probs) {
  const Rounds rounds = rounds_of(counters, temperatures);
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous() && block_size > 0 &&
                  hidden.size(0) == rounds.size * block_size && num_columns > 0,
              "hidden must hold ", block_size, " rows for each of ", rounds.size, " requests, got ",
              hidden.sizes());
  Walk a = {};
  a.type = type_of(hidden);
  a.num_rows = rounds.size;
  a.block_size = block_size;
  a.width = hidden.size(1);
  a.num_columns = num_columns;
  a.hidden = bytes(hidden);
  a.head = product_of(head, 0, a.width, num_columns, hidden.scalar_type());
  a.rounds = rounds;
  if (w1.has_value()) {
    TORCH_CHECK(w1->dim() == 2 && w1->is_contiguous() &&
                w1->scalar_type() == hidden.scalar_type());
    SequentialHead& h = a.sequential;
    TORCH_CHECK(kind >= 0 && kind <= 2, "there is no sequential head of kind ", kind);
    h.kind = static_cast<HeadKind>(kind);
    h.type = a.type;
    h.num_rows = a.num_rows;
    h.rank = w1->size(1);
    h.width = a.width;
    h.w1 = bytes(*w1);
    if (h.kind != HeadKind::kVanilla)
      h.joint = product_of(joint, 0, h.num_inputs(), h.num_outputs(), hidden.scalar_type());
    a.w2 = product_of(w2, 0, h.rank, num_columns, hidden.scalar_type());
    for (int64_t r = 0; r < rounds.size; ++r)
      TORCH_CHECK(rounds.anchors[r] >= 0 && rounds.anchors[r] < w1->size(0), "anchor ",
                  rounds.anchors[r], " is no token");
  }
  if (d2t.has_value()) a.d2t = values_of<int64_t>(*d2t, num_columns, "d2t");
  a.num_ids = w1.has_value() ? w1->size(0) : INT64_MAX;
  if (confidence.has_value()) {
    a.reads_token = confidence->numel() != a.width + 1;
    TORCH_CHECK(!a.reads_token || w1.has_value());
    a.confidence = values_of<float>(*confidence, a.width + (a.reads_token ? a.sequential.rank : 0) + 1,
                                    "confidence");
  }
  if (probs.has_value())
    a.probs = static_cast<float*>(const_cast<void*>(static_cast<const void*>(
        values_of<float>(*probs, rounds.size * block_size * num_columns, "probs"))));
  TORCH_CHECK(probs.has_value() || !rounds.has(DrawKind::kMaximal),
              "maximal coupling needs memory for probabilities");
  Tensor tokens = at::empty({rounds.size, block_size}, hidden.options().dtype(at::kLong));
  Tensor confidences = at::empty({confidence.has_value() ? rounds.size : 0, block_size},
                                 hidden.options().dtype(at::kFloat));
  a.tokens = tokens.mutable_data_ptr<int64_t>();
  a.confidences = confidences.mutable_data_ptr<float>();
  bool is_finite = true;
  if (rounds.size > 0) {
    Walking walking(kernels(), a);
    run_team([&](int64_t worker, int64_t num_workers, Team& team) {
      const bool own = walking.run(worker, num_workers, team);
      if (worker == 0) is_finite = own;
    });
    TORCH_CHECK(walking.unknown_token() == 0, "d2t names token ", walking.unknown_token());
  }
  return {tokens, confidences, is_finite};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def(
      "feed_context(Tensor taps, Tensor?[] projections, Tensor[] norms, float eps, "
      "Tensor(a!)[] k_pages, Tensor(b!)[] v_pages, Tensor cos, Tensor sin, Tensor positions, "
      "Tensor places) -> ()");
  m.def("block_inputs(Tensor embeddings, Tensor anchors, int mask_id, int block_size) -> Tensor");
  m.def(
      "walk(Tensor hidden, int block_size, Tensor?[] head, int num_columns, Tensor? w1, "
      "Tensor?[] w2, int kind, Tensor?[] joint, Tensor? confidence, Tensor counters, Tensor temperatures, Tensor? d2t, "
      "Tensor(a!)? probs) -> (Tensor, Tensor, bool)");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("feed_context", feed_context);
  m.impl("block_inputs", block_inputs);
  m.impl("walk", walk);
}

}  // namespace dspark
