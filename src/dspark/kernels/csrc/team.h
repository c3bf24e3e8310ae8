// Threads of one parallel region that wait for each other by spinning: between two phases of a
// small operator a new region would cost more than the phase.
#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#include <atomic>
#include <thread>
#include <vector>

namespace dspark {

class Team {
 public:
  explicit Team(int64_t size) : phases_(static_cast<size_t>(size)) {}

  // Called by each of `size` workers; returns when all have called. What one wrote before, all
  // read afterwards.
  void wait(int64_t size) {
    const int64_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int64_t i = 0; phase_.load(std::memory_order_acquire) == phase; ++i)
      if (i < kSpins) _mm_pause();
      else std::this_thread::yield();
  }

  // The same for callers that know their number; each of them always uses this or always that.
  // A word of its own tells the others of each worker: one journey of a line of memory, not three.
  // `meanwhile` is called again and again.
  template <class F>
  void meet(int64_t number, int64_t size, const F& meanwhile) {
    std::atomic<int64_t>& own = phases_[static_cast<size_t>(number)].value;
    const int64_t phase = own.load(std::memory_order_relaxed) + 1;
    own.store(phase, std::memory_order_release);
    int64_t spins = 0;
    for (int64_t i = 0; i < size; ++i)
      while (phases_[static_cast<size_t>(i)].value.load(std::memory_order_acquire) < phase)
        if (spins++ < kSpins) meanwhile();
        else std::this_thread::yield();
  }

 private:
  // Then another program probably has the processor; 30 us, of waits that take one to three. (Of a
  // pass in int8, both threads on one processor: 72 ms with 2^14, 16 with 2^11, 12 with 2^10.)
  static constexpr int64_t kSpins = 1 << 10;

  struct alignas(64) Phase {
    std::atomic<int64_t> value{0};
  };

  std::vector<Phase> phases_;
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> phase_{0};
};

// work(worker, num_workers, team) on each thread of PyTorch's; it must not throw.
template <class F>
void run_team(const F& work) {
  Team team(at::get_num_threads());
  if (at::in_parallel_region() || at::get_num_threads() == 1) {
    work(int64_t{0}, int64_t{1}, team);
    return;
  }
#pragma omp parallel num_threads(at::get_num_threads())
  work(static_cast<int64_t>(omp_get_thread_num()), static_cast<int64_t>(omp_get_num_threads()),
       team);
}

}  // namespace dspark
