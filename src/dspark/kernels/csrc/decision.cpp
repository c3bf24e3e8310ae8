// Operators over rows of scores, and the verdict on a round: which drafted tokens are committed.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <tuple>

#include "decision.h"

namespace dspark {
namespace {

// Rows of a matrix whose last dimension is contiguous.
struct Matrix : ScoreRows {
  Tensor kept;

  explicit Matrix(const Tensor& x) : kept(x.dim() == 2 && x.stride(1) == 1 ? x : x.contiguous()) {
    TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "expected rows of scores, got ", x.sizes());
    type = type_of(x);
    data = bytes(kept);
    num_rows = x.size(0);
    width = x.size(1);
    row_bytes = kept.stride(0) * kept.element_size();
  }
};

template <class F>
void each(int64_t count, const F& f) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) f(n);
  });
}

const int64_t* whole_numbers(const Tensor& x, int64_t size, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous() && x.numel() == size, name,
              " must be ", size, " contiguous int64 values, got ", x.sizes());
  return x.const_data_ptr<int64_t>();
}

std::tuple<Tensor, Tensor> best(const Tensor& scores) {
  const Matrix x(scores);
  Tensor values = at::empty({x.num_rows}, scores.options().dtype(at::kFloat));
  Tensor columns = at::empty({x.num_rows}, scores.options().dtype(at::kLong));
  float* to_value = values.mutable_data_ptr<float>();
  int64_t* to_column = columns.mutable_data_ptr<int64_t>();
  const Kernels& k = kernels();
  each(x.num_rows, [&](int64_t n) {
    const Best found = k.best(x.type, x.row(n), x.width);
    to_value[n] = found.has_nan ? NAN : found.value;
    to_column[n] = found.column;
  });
  return {values, columns};
}

Tensor gumbel_argmax(const Tensor& scores, const Tensor& seeds, const Tensor& positions,
                     const std::optional<Tensor>& token_ids) {
  const Matrix x(scores);
  const int64_t* seed = whole_numbers(seeds, x.num_rows, "seeds_N");
  const int64_t* position = whole_numbers(positions, x.num_rows, "positions_N");
  const int64_t* tokens =
      token_ids.has_value() ? whole_numbers(*token_ids, x.width, "token_ids_V") : nullptr;
  Tensor out = at::empty({x.num_rows}, scores.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const Kernels& k = kernels();
  each(x.num_rows, [&](int64_t n) {
    const int64_t column =
        k.shared_draw({x.type, x.row(n), 0.0f, 1.0f}, 0, x.width,
                      noise_key(seed[n], position[n], Stream::kToken), tokens)
            .column;
    to[n] = tokens == nullptr ? column : tokens[column];
  });
  return out;
}

Tensor softmax(const Tensor& scores) {
  const Matrix x(scores);
  Tensor out = at::empty({x.num_rows, x.width}, scores.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  each(x.num_rows, [&](int64_t n) {
    const float shift = k.best(x.type, x.row(n), x.width).value;
    float* probs = to + n * x.width;
    const float total = exponentials(k, {x.type, x.row(n), shift, 1.0f}, x.width, probs);
    k.divide(probs, x.width, total);
  });
  return out;
}

Tensor draw_categorical(const Tensor& weights, const Tensor& uniforms) {
  const Matrix x(weights);
  TORCH_CHECK(x.type == Type::kFloat32 && uniforms.scalar_type() == at::kDouble &&
                  uniforms.is_contiguous() && uniforms.numel() == x.num_rows,
              "expected float32 weights and a float64 uniform for each row");
  const double* u = uniforms.const_data_ptr<double>();
  Tensor out = at::empty({x.num_rows}, weights.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const Kernels& k = kernels();
  each(x.num_rows, [&](int64_t n) {
    const float* row = reinterpret_cast<const float*>(x.row(n));
    std::vector<double> sums(static_cast<size_t>(num_blocks(x.width)));
    block_sums(k, row, x.width, sums.data());
    to[n] = draw_column(row, x.width, sums.data(), u[n]);
  });
  return out;
}

// Rounding alone leaves this much of max(p - q, 0) where p equals q: dspark.algorithms.acceptance.
constexpr double kNegligibleMass = 4e-7;

// What the rows of a round are judged by.
struct Verification {
  const ScoreRows& logits;
  const Best* bests;  // of each row; null: nobody has looked
  const Rounds& rounds;
  const int64_t* starts;   // first row of each request
  const int64_t* lengths;  // drafted tokens that are verified
  const int64_t* tokens;   // [R][num_slots]
  int64_t num_slots;
  const float* draft_probs;  // [R][num_probs][num_columns]; null without maximal coupling
  int64_t num_probs, num_columns;
  const int64_t* column_of;  // of each target token, num_columns if it has none; null: its id

  Best best(const Kernels& k, int64_t n) const {
    return bests != nullptr ? bests[n] : k.best(logits.type, logits.row(n), logits.width);
  }
  // A row as its request draws from it; good until the thread asks for another one.
  Scores scores(const Kernels& k, int64_t n, int64_t r, float shift) const {
    const Scores row = {logits.type, logits.row(n), shift, rounds.temperature(r)};
    const Filter filter = rounds.filter(r);
    return filter.keeps_all() ? row : own_row_filter().filtered(k, row, logits.width, filter);
  }
  // Column of a drafted token in `draft_probs`, if it has one.
  std::optional<int64_t> column(int64_t token) const {
    if (token < 0 || token >= logits.width) return std::nullopt;
    const int64_t column = column_of == nullptr ? token : column_of[token];
    if (column >= num_columns) return std::nullopt;
    return column;
  }
  const float* q(int64_t r, int64_t slot) const {
    return draft_probs + (r * num_probs + slot) * num_columns;
  }
};

// The target's own token of a greedy or shared-noise row; -1: its scores are not finite.
int64_t target_token(const Kernels& k, const Verification& v, int64_t n, int64_t r, int64_t slot) {
  const Best found = v.best(k, n);
  if (found.has_nan || !std::isfinite(found.value)) return -1;
  if (v.rounds.kind(r) == DrawKind::kGreedy) return found.column;
  return k.shared_draw(v.scores(k, n, r, found.value), 0, v.logits.width,
                       v.rounds.shared_key(r, slot), nullptr)
      .column;
}

struct Outcome {
  int64_t num_accepted;
  int64_t next_token;  // -1: a row's scores are not finite
};

template <class TargetToken>
Outcome match(const Verification& v, int64_t r, const TargetToken& target) {
  for (int64_t j = 0;; ++j) {
    const int64_t token = target(v.starts[r] + j, j);
    if (token < 0 || j == v.lengths[r] || v.tokens[r * v.num_slots + j] != token)
      return {j, token};
  }
}

// weights = max(weights - q, 0), if more than a rounding is left of them.
void take_residual(const Kernels& k, const Verification& v, const float* q, float* weights,
                   std::vector<float>& rest, std::vector<double>& sums) {
  const int64_t width = v.logits.width;
  std::copy(weights, weights + width, rest.begin());
  if (v.column_of == nullptr)
    for (int64_t i = 0; i < v.num_columns; ++i) rest[static_cast<size_t>(i)] -= q[i];
  else
    for (int64_t i = 0; i < width; ++i)
      if (v.column_of[i] < v.num_columns) rest[static_cast<size_t>(i)] -= q[v.column_of[i]];
  k.clamp_at_zero(rest.data(), width);
  block_sums(k, rest.data(), width, sums.data());
  if (sum_in_order(sums.data(), num_blocks(width)) > kNegligibleMass)
    std::copy(rest.begin(), rest.end(), weights);
  else
    block_sums(k, weights, width, sums.data());
}

// Maximal coupling: accept with min(1, p / q), else draw from max(p - q, 0).
Outcome judge_maximal(const Kernels& k, const Verification& v, int64_t r,
                      std::vector<float>& probs, std::vector<float>& rest) {
  const int64_t width = v.logits.width;
  const int64_t size = width;
  probs.resize(static_cast<size_t>(size));
  for (int64_t j = 0;; ++j) {
    const int64_t n = v.starts[r] + j;
    const Best found = v.best(k, n);
    if (found.has_nan || !std::isfinite(found.value)) return {j, -1};
    const float total = exponentials(k, v.scores(k, n, r, found.value), width, probs.data());
    const float* q_row = nullptr;
    if (j < v.lengths[r]) {
      const int64_t token = v.tokens[r * v.num_slots + j];
      const std::optional<int64_t> column = v.column(token);
      const float q = column.has_value() ? v.q(r, j)[*column] : 0.0f;
      float p = column.has_value() ? probs[static_cast<size_t>(token)] : 0.0f;
      k.divide(&p, 1, total);
      const double ratio = q > 0.0f ? static_cast<double>(p) / static_cast<double>(q) : 0.0;
      if (v.rounds.uniform(r, j, Stream::kAccept) < std::min(ratio, 1.0)) continue;
      if (q > 0.0f) q_row = v.q(r, j);
    }
    k.divide(probs.data(), width, total);
    std::vector<double> sums(static_cast<size_t>(num_blocks(width)));
    if (q_row != nullptr) {
      rest.resize(static_cast<size_t>(size));
      take_residual(k, v, q_row, probs.data(), rest, sums);
    } else {
      block_sums(k, probs.data(), width, sums.data());
    }
    return {j, draw_column(probs.data(), width, sums.data(),
                           v.rounds.uniform(r, 0, Stream::kTarget))};
  }
}

void check(const Verification& v) {
  for (int64_t r = 0; r < v.rounds.size; ++r) {
    TORCH_CHECK(v.lengths[r] >= 0 && v.lengths[r] <= v.num_slots && v.starts[r] >= 0 &&
                    v.starts[r] + v.lengths[r] < v.logits.num_rows,
                "request ", r, " has no rows for ", v.lengths[r], " drafted tokens");
    TORCH_CHECK(v.rounds.kind(r) != DrawKind::kMaximal || v.lengths[r] <= v.num_probs,
                "request ", r, " needs the drafter's distributions");
  }
}

// The target's own tokens of rows by number, -2 for those that were not looked at. Few requests:
// their rows are looked at side by side, those behind a rejection in vain.
std::vector<int64_t> tokens_ahead(const Kernels& k, const Verification& v) {
  std::vector<int64_t> ahead(static_cast<size_t>(v.logits.num_rows), -2);
  if (v.rounds.size >= 2 * at::get_num_threads()) return ahead;
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t r = 0; r < v.rounds.size; ++r)
    for (int64_t j = 0; j <= v.lengths[r] && v.rounds.kind(r) != DrawKind::kMaximal; ++j)
      rows.emplace_back(r, j);
  each(static_cast<int64_t>(rows.size()), [&](int64_t i) {
    const auto [r, j] = rows[static_cast<size_t>(i)];
    const int64_t n = v.starts[r] + j;
    ahead[static_cast<size_t>(n)] = target_token(k, v, n, r, j);
  });
  return ahead;
}

bool are_greedy(const Rounds& rounds) {
  return !rounds.has(DrawKind::kShared) && !rounds.has(DrawKind::kMaximal);
}

// Accepted tokens and the next one of each request, [2, R]; a next token of -1 says that a row's
// scores are not finite.
Tensor decide_rows(const Tensor& logits, const Tensor& counters, const Tensor& options,
                   at::IntArrayRef starts, at::IntArrayRef lengths,
                   const std::optional<Tensor>& tokens, const std::optional<Tensor>& draft_probs,
                   const std::optional<Tensor>& column_of) {
  const Rounds rounds = rounds_of(counters, options);
  Tensor out = at::empty({2, rounds.size}, logits.options().dtype(at::kLong));
  int64_t* const accepted = out.mutable_data_ptr<int64_t>();
  decide(Matrix(logits), nullptr, rounds, starts, lengths, {tokens, draft_probs, column_of},
         accepted, accepted + rounds.size);
  return out;
}

}  // namespace

void decide(const ScoreRows& logits, const Best* bests, const Rounds& rounds,
            at::IntArrayRef starts, at::IntArrayRef lengths, const Drafts& drafts,
            int64_t* accepted, int64_t* next) {
  const std::optional<Tensor>&tokens = drafts.tokens, &probs = drafts.probs;
  TORCH_CHECK(!tokens.has_value() || (tokens->dim() == 2 && tokens->size(0) == rounds.size));
  TORCH_CHECK(static_cast<int64_t>(starts.size()) == rounds.size && lengths.size() == starts.size(),
              "expected a start and a length for each of ", rounds.size, " requests");
  Verification v = {logits,
                    bests,
                    rounds,
                    starts.data(),
                    lengths.data(),
                    tokens.has_value() ? whole_numbers(*tokens, tokens->numel(), "tokens") : nullptr,
                    tokens.has_value() ? tokens->size(1) : 0,
                    nullptr,
                    0,
                    0,
                    nullptr};
  if (probs.has_value()) {
    TORCH_CHECK(probs->dim() == 3 && probs->size(0) == rounds.size && probs->is_contiguous() &&
                    probs->scalar_type() == at::kFloat,
                "draft_probs must be contiguous float32 [R, K, S], got ", probs->sizes());
    v.draft_probs = probs->const_data_ptr<float>();
    v.num_probs = probs->size(1);
    v.num_columns = probs->size(2);
  }
  if (drafts.column_of.has_value())
    v.column_of = whole_numbers(*drafts.column_of, logits.width, "column_of");
  TORCH_CHECK(v.column_of != nullptr || v.num_columns <= logits.width);
  check(v);

  const Kernels& k = kernels();
  const auto write = [&](int64_t r, Outcome outcome) {
    accepted[r] = outcome.num_accepted;
    next[r] = outcome.next_token;
  };
  if (bests != nullptr && are_greedy(rounds)) {  // nothing is left that is worth a second thread
    for (int64_t r = 0; r < rounds.size; ++r)
      write(r, match(v, r, [&](int64_t n, int64_t j) { return target_token(k, v, n, r, j); }));
    return;
  }
  const std::vector<int64_t> ahead = tokens_ahead(k, v);
  std::atomic<int64_t> next_request{0};
  each(std::min<int64_t>(at::get_num_threads(), rounds.size), [&](int64_t) {
    std::vector<float> weights, rest;
    for (int64_t r = next_request++; r < rounds.size; r = next_request++)
      write(r, rounds.kind(r) == DrawKind::kMaximal
                   ? judge_maximal(k, v, r, weights, rest)
                   : match(v, r, [&](int64_t n, int64_t j) {
                       const int64_t known = ahead[static_cast<size_t>(n)];
                       return known != -2 ? known : target_token(k, v, n, r, j);
                     }));
  });
}

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("best(Tensor scores) -> (Tensor, Tensor)");
  m.def(
      "gumbel_argmax(Tensor scores, Tensor seeds, Tensor positions, Tensor? token_ids) -> Tensor");
  m.def("softmax(Tensor scores) -> Tensor");
  m.def("draw_categorical(Tensor weights, Tensor uniforms) -> Tensor");
  m.def(
      "decide(Tensor logits, Tensor counters, Tensor options, int[] starts, int[] lengths, "
      "Tensor? tokens, Tensor? draft_probs, Tensor? column_of) -> Tensor");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("best", best);
  m.impl("gumbel_argmax", gumbel_argmax);
  m.impl("softmax", softmax);
  m.impl("draw_categorical", draw_categorical);
  m.impl("decide", decide_rows);
}

}  // namespace dspark
