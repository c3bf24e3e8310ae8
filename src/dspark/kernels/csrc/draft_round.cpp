// A whole drafting round of a DSpark drafter in one call and one parallel region: the tokens that
// wait enter its context, the layers run over a block of each request, the block is walked. A round
// of one request is fifty pieces of work of a few microseconds; its weights are asked for ahead from
// the first to the last. Its bits are those of the operators called one after the other.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <vector>

#include "context_feed.h"
#include "layout.h"
#include "stack.h"
#include "walking.h"

namespace dspark {

// The weights and pages of one drafter, and memory for the work. Calls take turns.
struct DraftRound : torch::CustomClassHolder, private StackStages {
  using Optional = std::optional<Tensor>;
  using Parts = c10::List<Optional>;

  // The arguments of `ContextFeed` and `walk_of`. `mask_id`: what a block's slots hold after the
  // anchor, each a row of `embeddings`.
  DraftRound(c10::intrusive_ptr<StackPages> pages, const Parts& projections, std::vector<Tensor> norms,
             double eps, std::vector<Tensor> k_pages, std::vector<Tensor> v_pages,
             Tensor embeddings, int64_t mask_id, int64_t block_size, const Parts& head,
             int64_t num_columns, Optional w1, const Parts& w2, int64_t kind, const Parts& joint,
             Optional confidence, Optional d2t)
      : pages_(std::move(pages)),
        feed_(projections, std::move(norms), eps, k_pages, v_pages),
        embeddings_(std::move(embeddings)),
        mask_id_(mask_id),
        block_size_(block_size),
        walk_(walk_of(pages_->layers->dtype(), pages_->layers->width(), head, num_columns, w1, w2, kind, joint,
                      confidence, d2t)),
        row_bytes_(pages_->layers->width() * size_of(walk_.type)) {
    TORCH_CHECK(embeddings_.dim() == 2 && embeddings_.is_contiguous() &&
                    embeddings_.size(1) == pages_->layers->width() &&
                    embeddings_.scalar_type() == pages_->layers->dtype() && block_size > 0 &&
                    mask_id >= 0 && mask_id < embeddings_.size(0),
                "embeddings must be contiguous rows of the layers' width and dtype, that of the "
                "mask ", mask_id, " among them, got ", embeddings_.sizes());
    for (const Parts& parts : {head, w2, joint})
      for (const auto& part : parts) kept_.push_back(part);
    for (Optional& tensor : {std::ref(w1), std::ref(confidence), std::ref(d2t)})
      kept_.push_back(std::move(tensor));
  }

  // A block of each request: target ids [R, K], confidence logits [R, K], and whether all scores
  // were finite: if not, the other two are undefined.
  //   taps, positions, places: the tokens that wait, in parts
  //   table: pages by row; rows: that of each request
  //   forbidden: slots of all blocks and columns that no token may be of, see `Cells`
  //   counters, options: rows of `Rounds` one after the other; a block starts at the anchor's
  //   position, one before that of the first drafted token
  std::tuple<Tensor, Tensor, bool> run(std::vector<Tensor> taps, std::vector<Tensor> positions,
                                       std::vector<Tensor> places, const Tensor& cos,
                                       const Tensor& sin, const Tensor& table,
                                       std::vector<int64_t> rows, std::vector<int64_t> counters,
                                       std::vector<double> options, const Optional& probs,
                                       std::vector<int64_t> forbidden) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const Rounds rounds = rounds_of(counters, options);
    const int64_t size = rounds.size;
    TORCH_CHECK(size > 0 && static_cast<int64_t>(rows.size()) == size,
                "expected a row for each of ", size, " requests");
    std::vector<int64_t> runs;
    for (int64_t r = 0; r < size; ++r) {
      TORCH_CHECK(rounds.anchors[r] >= 0 && rounds.anchors[r] < embeddings_.size(0), "anchor ",
                  rounds.anchors[r], " is no token");
      runs.insert(runs.end(), {rows[static_cast<size_t>(r)], rounds.positions[r] - 1, block_size_});
    }
    Tensor tokens = at::empty({rounds.size, block_size_}, at::kLong);
    Tensor confidences = at::empty({rounds.size, block_size_}, at::kFloat);
    feed_.take(taps, positions, places, cos, sin);
    set_rounds(walk_, rounds, block_size_, tokens, confidences, probs);
    walk_.forbidden.take(forbidden, size * block_size_, walk_.num_columns);
    const auto [tables, starts, visible, own_positions, slots] =
        lay_out(table, runs, pages_->page_size, true, 1);
    const Layout layout =
        Layout::of(tables, starts, visible, own_positions, slots, size * block_size_);
    const int64_t num_bytes = layout.num_tokens * row_bytes_;
    const StackCall call = {layout, cos, sin, rows_.get(num_bytes), hidden_.get(num_bytes)};
    block_ = call.rows;
    walk_.hidden = call.hidden;
    walking_.take(walk_);
    pages_->layers->surround(call, *pages_, *this);
    TORCH_CHECK(walking_.unknown_token() == 0, "d2t names token ", walking_.unknown_token());
    return {tokens, confidences, is_finite_};
  }

 private:
  int64_t number() const override { return feed_.num_tokens() > 0 ? 1 : 2; }

  void read_before(const Worker& me, Reading& reading) const override {
    if (feed_.num_tokens() > 0) feed_.read(me, reading);
  }
  void read_after(const Worker& me, Reading& reading) const override {
    Walking::read(walk_, me, reading);
  }

  void before(const Worker& me) override {
    const Share rows = me.share(walk_.rounds.size * block_size_);
    for (int64_t n = rows.begin; n < rows.end; ++n) {
      const int64_t r = n / block_size_;
      const int64_t id = n % block_size_ == 0 ? walk_.rounds.anchors[r] : mask_id_;
      memcpy(block_ + n * row_bytes_, bytes(embeddings_) + id * row_bytes_,
             static_cast<size_t>(row_bytes_));
    }
    feed_.run(kernels(), me);
    // A block may be written over what was just fed: rejected tokens of the round before.
    me.meet();
  }

  void after(const Worker& me) override {
    const bool is_finite = walking_.run(kernels(), me);
    if (me.number == 0) is_finite_ = is_finite;
  }

  c10::intrusive_ptr<StackPages> pages_;
  ContextFeed feed_;
  Tensor embeddings_;
  int64_t mask_id_, block_size_;
  Walk walk_;
  int64_t row_bytes_;
  std::vector<Optional> kept_;  // weights
  std::mutex mutex_;
  Walking walking_;
  bool is_finite_ = true;
  Scratch rows_, hidden_;
  char* block_ = nullptr;
};

void define_draft_round(torch::Library& m) {
  using Optional = std::optional<Tensor>;
  using Parts = c10::List<Optional>;
  m.class_<DraftRound>("DraftRound")
      .def(torch::init<c10::intrusive_ptr<StackPages>, const Parts&, std::vector<Tensor>, double,
                       std::vector<Tensor>, std::vector<Tensor>, Tensor, int64_t, int64_t,
                       const Parts&, int64_t, Optional, const Parts&, int64_t, const Parts&,
                       Optional, Optional>())
      .def("run", &DraftRound::run);
}

}  // namespace dspark
