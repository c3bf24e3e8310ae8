// Asks for keys and values before they are needed, in the order in which they will be read:
// attention over many requests takes as long as reading, and memory should not wait while something
// is computed. Functions are static: files of every instruction set include this one.
#pragma once

#include <xmmintrin.h>

#include "kernels.h"

namespace dspark {

constexpr int64_t kLineBytes = 64;

// Positions that any row of the tile sees, cut to a chunk and counted from its start.
static inline PositionRange seen_by_any(const Attention& a, const AttentionTile& tile,
                                        int64_t start) {
  PositionRange range = {kChunk, 0};
  for (int64_t token = tile.token_begin; token < tile.token_end; ++token) {
    const int64_t first = a.window > 0 ? a.positions[token] + 1 - a.window - start : -start;
    const int64_t end = a.visible[token] - start;
    if (first < range.low) range.low = first > 0 ? first : 0;
    if (end > range.high) range.high = end < kChunk ? end : kChunk;
  }
  return range;
}

// On to the rows that lie side by side in the next page; false: there are none.
static inline bool next_rows(ReadAhead& r) {
  while (r.position >= r.range.high) {
    if (r.is_at_keys) {
      r.is_at_keys = false;
    } else {
      if (r.next == r.end) return false;
      r.piece = r.next++;
      r.range = seen_by_any(*r.a, *r.piece->tile, r.piece->chunk * kChunk);
      r.is_at_keys = true;
    }
    r.position = r.range.low;
  }
  const Attention& a = *r.a;
  const AttentionTile& tile = *r.piece->tile;
  const int64_t* const strides = r.is_at_keys ? a.k_strides : a.v_strides;
  const int64_t value_bytes = a.has_bytes ? 1 : a.type == Type::kBFloat16 ? 2 : 4;
  const int64_t step = a.has_bytes ? kBytePositions : 1;
  const int64_t position = r.piece->chunk * kChunk + r.position / step * step;
  const int64_t row = position % a.page_size / step;
  const int64_t in_page = a.page_size / step - row;
  const int64_t left = (r.range.high - r.position / step * step + step - 1) / step;
  const int64_t count = in_page < left ? in_page : left;
  r.at = (r.is_at_keys ? a.k_pages : a.v_pages) +
         (tile.block_table[position / a.page_size] * strides[0] + tile.kv_head * strides[1] +
          row * strides[2]) * value_bytes;
  r.rows_end = r.at + count * strides[2] * value_bytes;
  r.position = r.position / step * step + count * step;
  return true;
}

// Asks for some lines more, as far as they are not too far ahead.
static inline void ask(ReadAhead& r, int64_t num_lines) {
  if (num_lines > r.lines_allowed) num_lines = r.lines_allowed;
  while (num_lines > 0 && (r.at < r.rows_end || next_rows(r))) {
    const char* const stop = r.at + num_lines * kLineBytes;
    const char* const end = stop < r.rows_end ? stop : r.rows_end;
    for (; r.at < end; r.at += kLineBytes, --num_lines, --r.lines_allowed)
      _mm_prefetch(r.at, _MM_HINT_T1);
  }
}

}  // namespace dspark
