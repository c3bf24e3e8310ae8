// One chunk of positions for the rows (tokens x sharing heads) of one key/value head.
// A row's result over a chunk depends on the row and the positions that it sees: scores add over
// the head dimension in order, weights add by (position mod 16), values add by position, and a
// position that only another row sees adds an exact zero.
#include "attention_bytes.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {

int64_t attention_scratch(const Attention& a, int64_t num_rows) {
  const int64_t padded = padded_head_dim(a.head_dim);
  int64_t size = larger(Scratch::size(num_rows, padded), ByteScratch::size(num_rows, padded));
#if defined(__AMX_TILE__)
  size = larger(size, TileScratch::size(num_rows, a.head_dim));
#endif
  return (size + kLanes - 1) / kLanes * kLanes;
}

void attention_chunk(const Attention& a, const AttentionPiece& piece, float* scratch,
                     float* partials, int64_t row_stride, ReadAhead& ahead) {
  auto chunk_of_rows = chunk_of<Singles<float>>;
  if (a.has_bytes) {
    chunk_of_rows = chunk_of_bytes;
  } else if (a.type == Type::kBFloat16) {
    chunk_of_rows = chunk_of<Singles<uint16_t>>;
#if !defined(__AVX512F__)
    if (a.head_dim % kLanes == 0) chunk_of_rows = chunk_of<Halves>;
#endif
#if DSPARK_USES_PAIRS
    if (a.head_dim % (2 * kLanes) == 0) chunk_of_rows = chunk_of<Pairs>;
#endif
#if defined(__AMX_TILE__)
    if (a.head_dim % kStep == 0) chunk_of_rows = chunk_of_tiles;
#endif
  }
  chunk_of_rows(a, piece, scratch, partials, row_stride, ahead);
}

// state <- state + partial, both (values, maximum, sum) of one row.
void attention_merge(const Attention& a, float* state, const float* partial) {
  const int64_t padded = padded_head_dim(a.head_dim);
  float* end = state + padded;
  const float m = end[0] < partial[padded] ? partial[padded] : end[0];
  float factors[kLanes] = {end[0] - m, partial[padded] - m};
  store(factors, exp(load(factors)));
  const Floats old_factor = splat(factors[0]);
  const Floats new_factor = splat(factors[1]);
  for (int64_t e = 0; e < padded; e += kLanes)
    store(state + e, fma(load(partial + e), new_factor, mul(load(state + e), old_factor)));
  end[0] = m;
  end[1] = partial[padded + 1] * factors[1] + end[1] * factors[0];
}

void attention_finish(const Attention& a, const float* state, int64_t token, int64_t head) {
  const int64_t padded = padded_head_dim(a.head_dim);
  float m = state[padded];
  float sum = state[padded + 1];
  float factor = sum > 0.0f ? 1.0f : 0.0f;
  if (a.sinks != nullptr && sum > 0.0f) {
    const float sink = a.sinks[head];
    const float larger_one = m < sink ? sink : m;
    float factors[kLanes] = {m - larger_one, sink - larger_one};
    store(factors, exp(load(factors)));
    factor = factors[0];
    sum = sum * factor + factors[1];
  }
  const Floats inverse = splat(sum > 0.0f ? factor / sum : sum == sum ? 0.0f : sum);
  const int64_t at = token * a.out_strides[0] + head * a.out_strides[1];
  for (int64_t e = 0; e < a.head_dim; e += kLanes) {
    const int64_t count = smaller(kLanes, a.head_dim - e);
    const Floats y = mul(load(state + e), inverse);
    if (a.type == Type::kBFloat16) {
      uint16_t* to = reinterpret_cast<uint16_t*>(a.out) + at + e;
      if (count == kLanes) store(to, y);
      else store_some(to, y, count);
    } else {
      float* to = reinterpret_cast<float*>(a.out) + at + e;
      if (count == kLanes) store(to, y);
      else store_some(to, y, count);
    }
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark
