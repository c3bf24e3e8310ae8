// Weights in the order in which one thread will read them, asked for before it does: while it
// works on something else, while it waits for the others, and line for line while it reads.
// Memory is then never idle, and a product finds its weights in the second-level cache.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace dspark {

constexpr int64_t kLine = 64;

// Whole lines of memory, at least one.
struct Stretch {
  const char* begin;
  const char* end;
};

struct WeightStream {
  const Stretch* at;  // what is left to ask for: this stretch from `next` on, and those after it
  const Stretch* end;
  const char* next;
  int64_t ahead;  // lines asked for and not read yet
  int64_t limit;  // of them
};

// Asks for `count` more lines, or for what is left.
static inline __attribute__((always_inline)) void ask(WeightStream& s, int64_t count) {
  while (count > 0 && s.at != s.end) {
    const int64_t left = (s.at->end - s.next) / kLine;
    const int64_t now = count < left ? count : left;
    for (int64_t i = 0; i < now; ++i) _mm_prefetch(s.next + i * kLine, _MM_HINT_T1);
    s.next += now * kLine;
    s.ahead += now;
    count -= now;
    if (now == left && ++s.at != s.end) s.next = s.at->begin;
  }
}

// Lines to ask for while the next `count` lines of the stream are read. What is far ahead may come
// closer: pauses of the reading will make up for it.
static inline __attribute__((always_inline)) int64_t read_on(WeightStream& s, int64_t count) {
  constexpr int64_t kNear = 128;
  if (s.ahead < kNear) ask(s, kNear - s.ahead);
  s.ahead -= count;
  if (s.ahead > s.limit / 2) return count * 3 / 4;
  return s.ahead < s.limit / 8 ? count * 5 / 4 : count;
}

}  // namespace dspark
