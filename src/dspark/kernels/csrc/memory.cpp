// Memory in huge pages: a step reads weights and keys once, and with pages of 4 KiB the address
// translation costs more than the reads (on a virtual machine two to three times as much).
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "host.h"

namespace dspark {
namespace {

constexpr int64_t kHugePage = 2 << 20, kAlignment = 64;

int64_t num_bytes(at::IntArrayRef sizes, const at::TensorOptions& options) {
  int64_t count = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) count *= size;
  return ceil_div(count, kAlignment) * kAlignment;
}

// Zeroed memory of its own on the boundary of a huge page.
struct Mapping {
  char* start = nullptr;  // null: the system has no such memory
  int64_t size;

  explicit Mapping(int64_t wanted) : size(ceil_div(std::max<int64_t>(1, wanted), kHugePage) * kHugePage) {
#if defined(__linux__)
    // Larger than wanted, then cut, so that it can start on the boundary.
    void* const mapped = mmap(nullptr, static_cast<size_t>(size + kHugePage),
                              PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return;
    const int64_t address = reinterpret_cast<int64_t>(mapped);
    const int64_t first = ceil_div(address, kHugePage) * kHugePage;
    const int64_t end = address + size + kHugePage;
    if (first > address) munmap(mapped, static_cast<size_t>(first - address));
    if (end > first + size)
      munmap(reinterpret_cast<void*>(first + size), static_cast<size_t>(end - first - size));
    madvise(reinterpret_cast<void*>(first), static_cast<size_t>(size), MADV_HUGEPAGE);
    start = reinterpret_cast<char*>(first);
#endif
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() {
#if defined(__linux__)
    if (start != nullptr) munmap(start, static_cast<size_t>(size));
#endif
  }
};

Tensor zeros_in_huge_pages(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::TensorOptions options = at::TensorOptions().dtype(dtype);
  const int64_t wanted = num_bytes(sizes, options);
  if (wanted >= kHugePage) {
    const auto mapping = std::make_shared<Mapping>(wanted);
    if (mapping->start != nullptr)
      return at::from_blob(mapping->start, sizes, [mapping](void*) {}, options);
  }
  return at::empty(sizes, options).zero_();
}

// Reads all of x with all threads; the sum of its words, so that nothing can be left out.
int64_t read_all(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous(), "only contiguous memory can be read front to back");
  const int64_t size = static_cast<int64_t>(x.nbytes()) / kAlignment * kAlignment;
  const char* from = bytes(x);
  const auto sum_words = kernels().sum_words;
  std::atomic<uint32_t> total{0};
  const int64_t num_workers = at::get_num_threads();
  at::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    const auto at = [&](int64_t worker) {
      return size / kAlignment * worker / num_workers * kAlignment;
    };
    total += sum_words(from + at(begin), at(end) - at(begin));
  });
  return total;
}

}  // namespace

Tensor zeros_for_weights(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t kPiece = 64 << 20;
  static std::mutex mutex;
  static std::weak_ptr<Mapping> current;
  static int64_t used = 0;
  const int64_t wanted = num_bytes(sizes, options);
  const std::lock_guard<std::mutex> guard(mutex);
  std::shared_ptr<Mapping> piece = current.lock();
  if (piece == nullptr || used + wanted > piece->size) {
    piece = std::make_shared<Mapping>(std::max(wanted, kPiece));
    if (piece->start == nullptr) return at::empty(sizes, options).zero_();
    current = piece;
    used = 0;
  }
  char* const data = piece->start + used;
  used += wanted;
  return at::from_blob(data, sizes, [piece](void*) {}, options);
}

TORCH_LIBRARY_FRAGMENT(dspark, m) {
  m.def("zeros_in_huge_pages(int[] sizes, *, ScalarType dtype) -> Tensor", zeros_in_huge_pages);
  m.def("read_all(Tensor x) -> int", read_all);
}

}  // namespace dspark
