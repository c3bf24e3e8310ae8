// The drafter around its backbone: what a step leaves in its context, and the walk over a block.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "context_feed.h"
#include "walking.h"

namespace dspark {
namespace {

// Weights are not asked for ahead: these operators serve what a `DraftRound` does not.
template <class F>
void run_workers(const F& work) {
  run_team([&](int64_t number, int64_t count, Team& team) {
    WeightStream none = {};
    work(Worker{number, count, team, none});
  });
}

// See `ContextFeed`.
void feed_context(const Tensor& taps, const c10::List<std::optional<Tensor>>& projections,
                  at::TensorList norms, double eps, at::TensorList k_pages,
                  at::TensorList v_pages, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const Tensor& places) {
  ContextFeed feed(projections, norms.vec(), eps, k_pages.vec(), v_pages.vec());
  feed.take({taps}, {positions}, {places}, cos, sin);
  if (feed.num_tokens() > 0)
    run_workers([&](const Worker& me) { feed.run(kernels(), me); });
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

// The tokens of a block for each request, target ids [R, K], and confidence logits [R, K]; both
// are undefined if the last result says that a score was not finite. For the rest see `walk_of`.
std::tuple<Tensor, Tensor, bool> walk(
    const Tensor& hidden, int64_t block_size, const c10::List<std::optional<Tensor>>& head,
    int64_t num_columns, const std::optional<Tensor>& w1,
    const c10::List<std::optional<Tensor>>& w2, int64_t kind,
    const c10::List<std::optional<Tensor>>& joint, const std::optional<Tensor>& confidence,
    const Tensor& counters, const Tensor& options, const std::optional<Tensor>& d2t,
    const std::optional<Tensor>& probs) {
  const Rounds rounds = rounds_of(counters, options);
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous() && block_size > 0 &&
                  hidden.size(0) == rounds.size * block_size,
              "hidden must hold ", block_size, " rows for each of ", rounds.size, " requests, got ",
              hidden.sizes());
  Walk a = walk_of(hidden.scalar_type(), hidden.size(1), head, num_columns, w1, w2, kind, joint,
                   confidence, d2t);
  Tensor tokens = at::empty({rounds.size, block_size}, hidden.options().dtype(at::kLong));
  Tensor confidences =
      at::empty({rounds.size, block_size}, hidden.options().dtype(at::kFloat));
  set_rounds(a, rounds, block_size, tokens, confidences, probs);
  a.hidden = bytes(hidden);
  bool is_finite = true;
  if (rounds.size > 0) {
    Walking walking;
    walking.take(a);
    run_workers([&](const Worker& me) {
      const bool own = walking.run(kernels(), me);
      if (me.number == 0) is_finite = own;
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
      "Tensor?[] w2, int kind, Tensor?[] joint, Tensor? confidence, Tensor counters, Tensor options, Tensor? d2t, "
      "Tensor(a!)? probs) -> (Tensor, Tensor, bool)");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("feed_context", feed_context);
  m.impl("block_inputs", block_inputs);
  m.impl("walk", walk);
}

}  // namespace dspark
