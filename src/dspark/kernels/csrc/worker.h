// A thread of a parallel region: its share of the work, and the memory that it will read.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "product.h"
#include "team.h"

namespace dspark {

constexpr int64_t kPanelOutputs = kGroup * kPanelGroups;

inline int64_t size_of(Type type) { return type == Type::kBFloat16 ? 2 : 4; }

// Memory that is kept from call to call and only grows.
class Scratch {
 public:
  char* get(int64_t size) {
    if (size > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(ceil_div(size, 64) * 64))));
      TORCH_CHECK(memory_ != nullptr, "no memory for ", size, " bytes");
      size_ = size;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// Items of a row of work, `end` not among them.
struct Share {
  int64_t begin, end;
};

// A thread of the region.
struct Worker {
  int64_t number, count;
  Team& team;
  WeightStream& stream;  // of the weights that it will read; empty if it does not ask ahead

  Share share(int64_t num_items) const { return share_of(number, num_items); }
  // That of any thread.
  Share share_of(int64_t thread, int64_t num_items) const {
    return {num_items * thread / count, num_items * (thread + 1) / count};
  }
  // The same from the other end, for work that does not divide: half of the times each.
  Share share_back(int64_t num_items) const {
    return {num_items - num_items * (number + 1) / count, num_items - num_items * number / count};
  }
  void meet() const {
    team.meet(number, count, [this] {
      if (stream.ahead < stream.limit && stream.at != stream.end) ask(stream, 4);
      else _mm_pause();
    });
  }
  bool is_streamed() const { return stream.limit > 0; }
};

inline Stretch lines_around(const void* data, int64_t size) {
  const int64_t begin = reinterpret_cast<int64_t>(data);
  return {reinterpret_cast<const char*>(begin / kLine * kLine),
          reinterpret_cast<const char*>(ceil_div(begin + size, kLine) * kLine)};
}

inline int64_t num_lines(const void* data, int64_t size) {
  const Stretch lines = lines_around(data, size);
  return (lines.end - lines.begin) / kLine;
}

// f(data, size) for what belongs to the outputs of some panels beside the weights.
template <class F>
void each_side(const Product& p, Share panels, const F& f) {
  const int64_t begin = panels.begin * kPanelOutputs;
  const int64_t size = (std::min(panels.end * kPanelOutputs, p.num_outputs) - begin) * 4;
  if (panels.begin >= panels.end) return;
  if (p.bias != nullptr) f(p.bias + begin, size);
  if (p.scales != nullptr) f(p.scales + begin, size);
  if (p.sums != nullptr) f(p.sums + begin, size);
}

// What one thread reads in a pass, in this order.
struct Reading {
  std::vector<Stretch> stretches;

  void add(const void* data, int64_t size) {
    if (size > 0) stretches.push_back(lines_around(data, size));
  }
  void add(const Product& p, Share panels) {
    if (panels.begin >= panels.end) return;
    each_side(p, panels, [this](const void* data, int64_t size) { add(data, size); });
    const int64_t groups = ceil_div(p.num_outputs, kGroup), group_bytes = p.num_units * kLine;
    const int64_t begin = panels.begin * kPanelGroups;
    add(p.packed + begin * group_bytes,
        (std::min(panels.end * kPanelGroups, groups) - begin) * group_bytes);
  }
};

// Some panels of a product for the first rows of an operand. `is_next`: of the thread's stream they
// are what is read next.
inline void multiply(const Kernels& k, const Product& product, const Operand& x, int64_t num_rows,
                     Type type, char* out, Share panels, const Worker& me, bool is_next = true) {
  if (panels.begin >= panels.end || num_rows == 0) return;
  Linear task = linear_of(product, type);
  task.x = x.data.data();
  task.x_stride = x.row_bytes;
  task.num_tokens = num_rows;
  task.token_scales = x.scales.data();
  task.out = out;
  task.out_stride = product.num_outputs;
  if (is_next && me.is_streamed()) {
    task.stream = &me.stream;
    each_side(product, panels, [&](const void* data, int64_t size) {
      me.stream.ahead -= num_lines(data, size);
    });
  }
  k.linear(task, panels.begin, panels.end);
}

}  // namespace dspark
