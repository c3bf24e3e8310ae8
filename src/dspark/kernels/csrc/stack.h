// A pass through a stack's layers as a part of a larger operator, in the same parallel region.
#pragma once

#include <torch/custom_class.h>

#include <vector>

#include "attention_work.h"
#include "worker.h"

namespace dspark {

// What the threads do before the layers and after them. All of them call each function once.
struct StackStages {
  virtual ~StackStages() = default;
  // What a thread reads in a stage, in this order; the same for calls of one number, which is not 0.
  virtual int64_t number() const = 0;
  virtual void read_before(const Worker& me, Reading& reading) const = 0;
  virtual void read_after(const Worker& me, Reading& reading) const = 0;
  // Leaves the rows that enter the first layer; ends with a meeting.
  virtual void before(const Worker& me) = 0;
  // Row n of the result is there for the thread whose share of the rows holds it.
  virtual void after(const Worker& me) = 0;
};

// One call of it: rows of the residual stream [N][D], which change, and memory for the result.
struct StackCall {
  const Layout& layout;
  const Tensor& cos;
  const Tensor& sin;
  char* rows;
  char* hidden;
};

struct StackPages;

// The layers as other sources see them.
struct StackLayers : torch::CustomClassHolder {
  // A pass without taps and logits between two stages. The stack must have a final norm.
  virtual void surround(const StackCall& call, const StackPages& pages, StackStages& stages) = 0;
  virtual int64_t width() const = 0;
  virtual at::ScalarType dtype() const = 0;
};

// Keys and values of the layers of one stack, checked once: there are two tensors for each layer,
// and to take them from Python and to look at them takes as long as many a product.
struct StackPages : torch::CustomClassHolder {
  int64_t owner = 0;  // number of the stack
  c10::intrusive_ptr<StackLayers> layers;  // the stack
  std::vector<Tensor> tensors;  // keeps the memory alive
  std::vector<Attention> attention;  // of each layer, as far as the pages tell
  int64_t num_pages = 0, page_size = 0;
};

// Registered after the class of pages, which it takes.
void define_draft_round(torch::Library& m);

}  // namespace dspark
