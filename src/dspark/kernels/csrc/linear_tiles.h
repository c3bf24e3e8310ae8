// Products by tile registers (AMX): up to 16 tokens by 16 outputs by 16 units at a time. A row of
// the product depends on its token alone.
#pragma once

#include "linear_outputs.h"

#if defined(__AMX_TILE__)

namespace dspark {
namespace DSPARK_ISA {

constexpr int64_t kTileUnits = 16;
constexpr int64_t kTilePrefetchBytes = 8192;
constexpr int64_t kFirstLevelBytes = 40 << 10;  // of weights that stay there beside the rest
constexpr int64_t kInputBytes = 1 << 20;  // that stay in the second-level cache
constexpr int64_t kLongRowBytes = 64 << 10;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-1 are sums of the first tokens, 2-3 of the second, 4-5 hold tokens, 6-7 weights.
DSPARK_INLINE void configure_tiles(int64_t num_tokens) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? num_tokens : kTileUnits);
  }
  // The intrinsic tells the compiler of the first 8 bytes only.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

#define DSPARK_MULTIPLY(sum, tokens, weights)                    \
  if constexpr (kIsInt8) _tile_dpbusd(sum, tokens, weights);     \
  else _tile_dpbf16ps(sum, tokens, weights)

#define DSPARK_LOAD_TOKENS(tile, x)                              \
  if constexpr (kStreams) _tile_stream_loadd(tile, x, stride);   \
  else _tile_loadd(tile, x, stride)

// Long rows of many tokens, logits, lie too far apart for the caches: reading a line before it is
// written would cost more than the product.
DSPARK_INLINE bool passes_caches_by(const Linear& a) {
  return a.out_stride * 2 >= kLongRowBytes && a.num_tokens > 32 &&
         (reinterpret_cast<intptr_t>(a.out) | a.out_stride * 2) % kUnitBytes == 0;
}

// Sums of one or two tiles of tokens, and what turns them into outputs. They are written while
// the next product runs: its tiles and these vectors are different parts of the processor.
template <bool kIsInt8, int kGroups>
struct Product {
  alignas(64) char sums[2][kGroups][16][64];
  Outputs outputs[kGroups];
  int64_t output;
  int64_t tokens[2];  // the first of each tile
  int64_t num_tokens;  // of a tile
  int64_t num_rows;  // of all tiles
  int64_t num_written;
  bool has_lines;  // of 32 bfloat16 outputs each
};

template <bool kIsInt8, int kGroups>
DSPARK_INLINE void row_values(const Linear& a, const Product<kIsInt8, kGroups>& p, int64_t tile,
                              int64_t row, Floats* values) {
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    const Words sum = load_words(p.sums[tile][g][row]);
    if constexpr (kIsInt8) values[g] = finish(a, p.outputs[g], sum, p.tokens[tile] + row);
    else values[g] = finish(a, p.outputs[g], as_floats(sum), p.tokens[tile] + row);
  }
}

// Rows that are not whole lines of bfloat16: apart, so that its calls cost the others nothing.
template <bool kIsInt8, int kGroups>
__attribute__((noinline)) void write_any_rows(const Linear& a,
                                              const Product<kIsInt8, kGroups>& p, int64_t tile,
                                              int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    Floats values[kGroups];
    row_values(a, p, tile, row, values);
    write<kGroups>(a, values, p.tokens[tile] + row, p.output);
  }
}

template <bool kIsInt8, int kGroups>
DSPARK_INLINE void write_rows(const Linear& a, Product<kIsInt8, kGroups>& p, int64_t count) {
  const bool is_streamed = passes_caches_by(a);
  const int64_t stop = p.num_written + count < p.num_rows ? p.num_written + count : p.num_rows;
  while (p.num_written < stop) {
    const int64_t tile = p.num_written >= p.num_tokens;
    const int64_t skipped = tile * p.num_tokens;
    const int64_t begin = p.num_written - skipped;
    const int64_t end = stop - skipped < p.num_tokens ? stop - skipped : p.num_tokens;
    if (p.has_lines) {
      uint16_t* out = reinterpret_cast<uint16_t*>(a.out) +
                      (p.tokens[tile] + begin) * a.out_stride + p.output;
      for (int64_t row = begin; row < end; ++row, out += a.out_stride) {
        Floats values[kGroups];
        row_values(a, p, tile, row, values);
        const Words line = two_as_bf16(values[0], values[kGroups - 1]);
        if (is_streamed) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), line);
        else store_words(out, line);
      }
    } else {
      write_any_rows(a, p, tile, begin, end);
    }
    p.num_written = skipped + end;
  }
}

// One product, while the rows of the one before are written. Two tiles of tokens share each load
// of weights. With kStreams the weights fit the first-level cache, and the tokens pass it by.
template <bool kIsInt8, int kTiles, int kGroups, bool kStreams>
void multiply_tiles(const Linear& a, const char* weights, Ahead& ahead,
                    Product<kIsInt8, kGroups>& p, Product<kIsInt8, kGroups>& before) {
  const int64_t stride = a.x_stride;
  const int64_t num_steps = a.num_units / kTileUnits;
  const int64_t rows_per_step = (before.num_rows + num_steps - 1) / num_steps;
  const char* first = a.x + p.tokens[0] * stride;
  const char* second = a.x + p.tokens[1] * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < num_steps; ++i) {
    DSPARK_LOAD_TOKENS(4, first);
    _tile_loadd(6, weights, kGroups * kUnitBytes);
    DSPARK_MULTIPLY(0, 4, 6);
    if constexpr (kGroups == 2) {
      _tile_loadd(7, weights + kUnitBytes, kGroups * kUnitBytes);
      DSPARK_MULTIPLY(1, 4, 7);
    }
    if constexpr (kTiles == 2) {
      DSPARK_LOAD_TOKENS(5, second);
      DSPARK_MULTIPLY(2, 5, 6);
      if constexpr (kGroups == 2) {
        DSPARK_MULTIPLY(3, 5, 7);
      }
    }
    step(ahead);
    write_rows(a, before, rows_per_step);
    weights += kTileUnits * kGroups * kUnitBytes;
    first += kTileUnits * 4;
    second += kTileUnits * 4;
  }
  _tile_stored(0, p.sums[0][0], 64);
  if constexpr (kGroups == 2) _tile_stored(1, p.sums[0][kGroups - 1], 64);
  if constexpr (kTiles == 2) {
    _tile_stored(2, p.sums[1][0], 64);
    if constexpr (kGroups == 2) _tile_stored(3, p.sums[1][kGroups - 1], 64);
  }
}

#undef DSPARK_MULTIPLY
#undef DSPARK_LOAD_TOKENS

// Panels of kGroups groups, one after the other; for each, all tokens. All tiles have one size,
// and the last may overlap the one before: a token's result is the same in both.
template <bool kIsInt8, int kGroups, bool kStreams>
void tile_panels(const Linear& a, int64_t panel_begin, int64_t panel_end, int64_t token_begin,
                 int64_t token_end) {
  const int64_t num_tiles = (token_end - token_begin + 15) / 16;
  const int64_t num_visits = (num_tiles + 1) / 2;
  const int64_t num_tokens = (token_end - token_begin + num_tiles - 1) / num_tiles;
  const int64_t panel_bytes = kGroups * a.num_units * kUnitBytes;
  const char* weights = a.packed + panel_begin * kPanelGroups * a.num_units * kUnitBytes;
  const char* range_end = weights + (panel_end - panel_begin) * panel_bytes;
  configure_tiles(num_tokens);
  Product<kIsInt8, kGroups> products[2];
  products[0].num_rows = products[1].num_rows = 0;
  int which = 0;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const char* end = weights + panel_bytes;
    const char* next_end = end < range_end ? end + panel_bytes : range_end;
    const int64_t output = panel * kPanelGroups * kGroup;
    Outputs outputs[kGroups];
    for (int g = 0; g < kGroups; ++g) outputs[g] = outputs_at<kIsInt8>(a, output + g * kLanes);
    for (int64_t visit = 0; visit < num_visits; ++visit) {
      Product<kIsInt8, kGroups>& before = products[which];
      Product<kIsInt8, kGroups>& p = products[which ^= 1];
      p.output = output;
      for (int g = 0; g < kGroups; ++g) p.outputs[g] = outputs[g];
      const int64_t tiles_left = num_tiles - 2 * visit;
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t first = token_begin + (2 * visit + i) * num_tokens;
        p.tokens[i] = first + num_tokens < token_end ? first : token_end - num_tokens;
      }
      p.num_tokens = num_tokens;
      p.num_rows = tiles_left > 1 ? 2 * num_tokens : num_tokens;
      p.num_written = 0;
      p.has_lines = kGroups == 2 && a.out_type == Type::kBFloat16 &&
                    output + kGroups * kLanes <= a.num_outputs;
      Ahead ahead = ahead_of(a, visit, num_visits, a.num_units / kTileUnits, panel == panel_begin,
                             weights, end, next_end, kTilePrefetchBytes);
      if (tiles_left > 1)
        multiply_tiles<kIsInt8, 2, kGroups, kStreams>(a, weights, ahead, p, before);
      else
        multiply_tiles<kIsInt8, 1, kGroups, kStreams>(a, weights, ahead, p, before);
    }
    weights = end;
  }
  write_rows(a, products[which], products[which].num_rows);
  if (passes_caches_by(a)) _mm_sfence();
  _tile_release();
}

// Tokens in chunks that stay in the second-level cache while the panels pass.
template <bool kIsInt8>
void tile_product(const Linear& a, int64_t panel_begin, int64_t panel_end) {
  const int64_t fitting = kInputBytes / (a.num_units * 4) / 32 * 32;
  const int64_t largest = fitting < 32 ? 32 : fitting;
  const int64_t num_chunks = (a.num_tokens + largest - 1) / largest;
  const int64_t num_groups = (a.num_outputs + kGroup - 1) / kGroup;
  const int64_t whole = num_groups / kPanelGroups;  // panels
  const int64_t whole_end = panel_end < whole ? panel_end : whole;
  const bool streams =
      a.num_tokens > 32 && kPanelGroups * a.num_units * kUnitBytes <= kFirstLevelBytes;
  const auto run = streams ? tile_panels<kIsInt8, 2, true> : tile_panels<kIsInt8, 2, false>;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = chunk * a.num_tokens / num_chunks;
    const int64_t end = (chunk + 1) * a.num_tokens / num_chunks;
    if (panel_begin < whole_end) run(a, panel_begin, whole_end, begin, end);
    if (whole_end < panel_end)
      tile_panels<kIsInt8, 1, false>(a, whole_end, panel_end, begin, end);
  }
}

}  // namespace DSPARK_ISA
}  // namespace dspark

#endif
