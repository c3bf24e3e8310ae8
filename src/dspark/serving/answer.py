"""One answer while it grows in the engine's thread: rounds become pieces of text."""

from dspark.core import FinishReason, Request, RoundResult
from dspark.serving.work import Counts, Order, Piece
from dspark.text.detokenizer import Detokenizer
from dspark.text.tokenizer import Tokenizer


class Answer:
    """Text, counts and times of one request of an order."""

    __slots__ = ("counts", "detokenizer", "first_s", "index", "last_s", "order", "request")

    def __init__(self, order: Order, index: int, tokenizer: Tokenizer) -> None:
        self.order = order
        self.index = index
        self.request: Request = order.requests[index]
        self.detokenizer = Detokenizer(tokenizer, self.request.params.stop)
        self.counts = Counts()
        self.first_s: float | None = None
        self.last_s = 0.0

    def add(self, result: RoundResult, now_s: float) -> Piece:
        """The piece that a round's tokens make."""
        counts = self.counts
        counts.num_tokens += len(result.token_ids)
        if result.is_prefill:
            counts.num_cached = result.num_cached
        else:
            counts.num_rounds += 1
            counts.num_offered += result.num_offered
            counts.num_verified += result.num_verified
            counts.num_accepted += result.num_accepted
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        text = self.detokenizer.push(result.token_ids)
        if result.finish_reason is not None:
            text += self.detokenizer.flush()
        return Piece(
            self.index, text, result.token_ids, result.logprobs, result.finish_reason, counts
        )

    def empty(self) -> Piece:
        """The whole answer of a request for no tokens."""
        return Piece(self.index, "", (), None, FinishReason.LENGTH, self.counts)
