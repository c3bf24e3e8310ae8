// Which instruction set runs.
#include <torch/library.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

#include "host.h"

namespace dspark {
namespace {

// Of so many tokens, the weights are asked for ahead of their use. Fewer leave the processor's own
// prefetching time enough (measured: with tiles one token 3 % faster without, eight 7 % slower; by
// vectors four 8 to 11 % faster, eight 10 to 25 % slower); more take longer to multiply than memory
// takes to answer: with tiles more than 32, by vectors more than 16 (measured: 32 tokens by vectors
// 9 % faster without). By the vectors of AVX2 none: a product there takes as long as reading from
// 4 tokens on (measured: 8 tokens 22 to 25 % faster without, 16 tokens 11 to 18 %); nor by those of
// AVX-512 without VNNI (measured on Skylake-SP, beside other work: 8 tokens 19 % faster in bfloat16
// and 32 % in int8, 16 tokens 6 and 35 %, but 12 tokens in bfloat16 15 % slower).
constexpr TokenNumbers kStreamedByTiles = {4, 32}, kStreamedByVectors = {5, 16};
constexpr TokenNumbers kNotStreamed = {1, 0};

#define DSPARK_KERNELS(isa, streamed)                                                      \
  Kernels {                                                                                \
    isa::linear, isa::quantize_row, isa::place_bytes, isa::attention_scratch,              \
        isa::attention_chunk, isa::attention_merge, isa::attention_finish, isa::rms_norm,  \
        isa::silu_mul, isa::rotate, isa::best, isa::shared_draw, isa::exponential_block,   \
        isa::divide, isa::clamp_at_zero, isa::block_sum, isa::score_row, isa::count_from,  \
        isa::keep_from, isa::gather_from, isa::part_maxima, isa::add_row, isa::dot,        \
        isa::sum_words, streamed                                                           \
  }

// Least to most capable; the order is the numbering of `use_instructions`.
constexpr Kernels kSets[] = {
    DSPARK_KERNELS(avx2, kNotStreamed), DSPARK_KERNELS(avx512, kNotStreamed),
    DSPARK_KERNELS(avx512vnni, kStreamedByVectors), DSPARK_KERNELS(avx512bf16, kStreamedByVectors),
    DSPARK_KERNELS(amx, kStreamedByTiles)};

// Linux hands out the tile registers on request, once for the whole process.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
#else
  return false;
#endif
}

// Number of sets that this processor runs; 0: none.
int64_t num_sets() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!has_avx512) return 1;
  if (!__builtin_cpu_supports("avx512vnni")) return 2;
  if (!__builtin_cpu_supports("avx512bf16")) return 3;
  const bool has_tiles = __builtin_cpu_supports("amx-tile") &&
                         __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8");
  return has_tiles && may_use_tiles() ? 5 : 4;
}

std::atomic<int64_t> chosen_set{-1};

bool is_supported() { return num_sets() > 0; }

// Tests compare the instruction sets that this machine has; returns whether it has this one.
bool use_instructions(int64_t set) {
  if (set < 0 || set >= num_sets()) return false;
  chosen_set.store(set);
  return true;
}

}  // namespace

const Kernels& kernels() {
  int64_t set = chosen_set.load(std::memory_order_relaxed);
  if (set < 0) {
    set = num_sets() - 1;
    TORCH_CHECK(set >= 0, "this processor has neither AVX2 nor FMA");
    chosen_set.store(set, std::memory_order_relaxed);
  }
  return kSets[set];
}

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("is_supported() -> bool", is_supported);
  m.def("use_instructions(int set) -> bool", use_instructions);
}

}  // namespace dspark
