// The verdict on a round from rows of logits, for operators that have them at hand.
#pragma once

#include <optional>

#include "rounds.h"

namespace dspark {

// Rows of scores in memory, of which each is contiguous.
struct ScoreRows {
  Type type;
  const char* data;
  int64_t num_rows, width, row_bytes;

  const char* row(int64_t n) const { return data + n * row_bytes; }
};

// What was proposed for R requests, as dspark.kernels.decision.decide takes it.
struct Drafts {
  std::optional<Tensor> tokens;     // [R][K]
  std::optional<Tensor> probs;      // [R][K][S]
  std::optional<Tensor> column_of;  // [V]
};

// Writes how many drafted tokens each request accepts, and the token after them, -1 where a row's
// scores are not finite. `bests`: of each row, if somebody has looked already, else null. Throws
// where the parts do not fit each other.
void decide(const ScoreRows& logits, const Best* bests, const Rounds& rounds,
            at::IntArrayRef starts, at::IntArrayRef lengths, const Drafts& drafts,
            int64_t* accepted, int64_t* next);

}  // namespace dspark
