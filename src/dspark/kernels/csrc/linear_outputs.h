// From sums to outputs: scales, bias, rounding; and asking memory for the weights to come.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace dspark {
namespace DSPARK_ISA {

constexpr int64_t kUnitBytes = 64;  // one unit of 16 outputs

DSPARK_INLINE Floats load_up_to(const float* p, int64_t count) {
  return count >= kLanes ? load(p) : load_some(p, count);
}

DSPARK_INLINE Words load_words_up_to(const int32_t* p, int64_t count) {
  if (count >= kLanes) return load_words(p);
  int32_t values[kLanes] = {};
  memcpy(values, p, static_cast<size_t>(count) * sizeof(int32_t));
  return load_words(values);
}

// What turns the sums of 16 outputs, `first` and those after it, into values.
struct Outputs {
  Words shift;
  Floats scales, bias;
};

template <bool kIsInt8>
DSPARK_INLINE Outputs outputs_at(const Linear& a, int64_t first) {
  const int64_t count = a.num_outputs - first;
  Outputs o = {zero_words(), zero(), zero()};
  if constexpr (kIsInt8) {
    // The 128 that was added to each input is taken off as 128 times the sum of the weights.
    o.shift = times_128(load_words_up_to(a.output_sums + first, count));
    o.scales = load_up_to(a.output_scales + first, count);
  }
  if (a.bias != nullptr) o.bias = load_up_to(a.bias + first, count);
  return o;
}

DSPARK_INLINE Floats finish(const Linear& a, const Outputs& o, Floats sum, int64_t) {
  return a.bias == nullptr ? sum : add(sum, o.bias);
}

DSPARK_INLINE Floats finish(const Linear& a, const Outputs& o, Words sum, int64_t token) {
  const Floats value = mul(to_floats(sub_words(sum, o.shift)), splat(a.token_scales[token]));
  return finish(a, o, mul(value, o.scales), token);
}

template <int kGroups, class T>
DSPARK_INLINE void write_values(const Linear& a, const Floats* values, int64_t token,
                                int64_t output) {
  T* out = reinterpret_cast<T*>(a.out) + token * a.out_stride + output;
  const int64_t left = a.num_outputs - output;
  if (kGroups % 2 == 0 && left >= kGroups * kLanes) {
    for (int g = 0; g < kGroups; g += 2) store_two(out + g * kLanes, values[g], values[g + 1]);
    return;
  }
  for (int g = 0; g < kGroups; ++g) {
    const int64_t count = left - g * kLanes;
    if (count >= kLanes) store(out + g * kLanes, values[g]);
    else store_some(out + g * kLanes, values[g], count);
  }
}

// Values of some groups of outputs of one token.
template <int kGroups>
DSPARK_INLINE void write(const Linear& a, const Floats* values, int64_t token, int64_t output) {
  if (a.out_type == Type::kBFloat16) write_values<kGroups, uint16_t>(a, values, token, output);
  else write_values<kGroups, float>(a, values, token, output);
}

// Lines of memory to ask for, so many in each step of a product; those of a stream beside them.
struct Ahead {
  const char* next = nullptr;
  const char* end = nullptr;
  int64_t lines_per_step = 0;
  bool is_near = false;
  WeightStream* stream = nullptr;
  int64_t stream_lines_per_step = 0;
  // Instead of all that, one line with each unit, so many bytes behind its weights; 0: none.
  bool is_by_unit = false;
  int64_t apart = 0;
};

// Asks for what `count` steps ask for.
// What is needed soon goes to the first-level cache. The rest must not: while it travels it would
// hold the buffers through which the second level answers.
DSPARK_INLINE void step(Ahead& ahead, int64_t count = 1) {
  const char* stop = ahead.next + count * ahead.lines_per_step * kUnitBytes;
  if (stop > ahead.end) stop = ahead.end;
  if (ahead.is_near)
    for (; ahead.next < stop; ahead.next += kUnitBytes) _mm_prefetch(ahead.next, _MM_HINT_T0);
  else
    for (; ahead.next < stop; ahead.next += kUnitBytes) _mm_prefetch(ahead.next, _MM_HINT_T1);
  if (ahead.stream != nullptr) ask(*ahead.stream, count * ahead.stream_lines_per_step);
}

// What a visit to the weights [begin, end) asks for, when there are `num_visits` to them, each of
// `num_steps` steps. The first one in a call finds them in memory and asks for them itself, so many
// bytes before use; the others share the lines of the weights that come next, up to `next_end`.
// With a stream, all share what it has to ask for, and the first finds its weights near by.
DSPARK_INLINE Ahead ahead_of(const Linear& a, int64_t visit, int64_t num_visits, int64_t num_steps,
                             bool is_first, const char* begin, const char* end,
                             const char* next_end, int64_t distance) {
  const auto parts = [](int64_t lines, int64_t count) { return (lines + count - 1) / count; };
  const int64_t num_lines = (end - begin) / kUnitBytes;
  Ahead ahead = {begin + distance, end + distance, parts(num_lines, num_steps), true, nullptr, 0};
  if (ahead.end > next_end) ahead.end = next_end;
  if (a.stream != nullptr) {
    const int64_t lines = visit == 0 ? read_on(*a.stream, num_lines) : num_lines;
    ahead.stream = a.stream;
    ahead.stream_lines_per_step = parts(lines, num_visits * num_steps);
    if (visit > 0) ahead.end = ahead.next;
  } else if (num_visits > 1 && !(is_first && visit == 0)) {
    const int64_t share = parts((next_end - end) / kUnitBytes, num_visits - is_first);
    ahead.next = end + (visit - is_first) * share * kUnitBytes;
    ahead.end = ahead.next + share * kUnitBytes;
    if (ahead.end > next_end) ahead.end = next_end;
    ahead.lines_per_step = parts(share, num_steps);
    ahead.is_near = false;
  }
  return ahead;
}

}  // namespace DSPARK_ISA
}  // namespace dspark
