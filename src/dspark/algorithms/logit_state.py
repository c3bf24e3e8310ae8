"""What one request's options do to logits before temperature: bias, bans, penalties.
It knows the request's own history and no other request; temperature and filters come later.

Row j of a round stands after the committed answer AND the j tokens drafted before it, so every
rule here takes that drafted prefix. Letters: n rows of one request, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.row_chunks import row_chunks
from dspark.core import SamplingParams
from dspark.errors import InputError


class LogitState:
    """The history of one request as far as its options look at it; `commit` moves it forward.

    Tensors over the vocabulary exist only for requests with penalties.
    """

    def __init__(
        self,
        *,
        request_id: str,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | None = None,
    ) -> None:
        """Raises `InputError` for an option that names a token outside the vocabulary."""
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        for word in params.bad_words:
            _check_ids("bad_words", word, vocab_size)
        self.request_id = request_id
        self.params = params
        self.num_answer = 0
        self._vocab_size = vocab_size
        self._device = device
        self._bias_ids = self._ids(params.logit_bias)
        self._bias_values = torch.tensor(
            list(params.logit_bias.values()), dtype=torch.float32, device=device
        )
        self._banned_ids = self._ids([word[0] for word in params.bad_words if len(word) == 1])
        self._long_words = tuple(tuple(word) for word in params.bad_words if len(word) > 1)
        stop_ids = {token for token in eos_ids if 0 <= token < vocab_size}
        self._stop_ids = self._ids(sorted(stop_ids | set(params.stop_token_ids)))
        self._tail_length = max((len(word) - 1 for word in self._long_words), default=0)
        self._tail: tuple[int, ...] = ()
        self._seen_V: Tensor | None = None
        self._counts_V: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._counts_V = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._remember(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed tokens to the answer."""
        self.num_answer += len(token_ids)
        self._remember(token_ids)
        if self._counts_V is not None and token_ids:
            ids = self._ids(token_ids)
            self._counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))

    @property
    def shapes_logits(self) -> bool:
        """Whether any rule here can still change a logit."""
        return bool(
            self.params.logit_bias
            or self.params.bad_words
            or self.num_answer < self.params.min_tokens
            or self._seen_V is not None
            or self._counts_V is not None
        )

    def shape_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        """Applies the rules in place, in this order: bias, bad words, min_tokens, penalties.

        `logits_nV` float32; with a `vocabulary` its columns are the drafter's. `drafted[j]` are
        the tokens drafted before row j in this round; invalid ids among them are passed over.
        """
        for rows in row_chunks(logits_nV):
            self._add_bias_(logits_nV[rows], vocabulary)
            self._ban_words_(logits_nV[rows], drafted[rows], vocabulary)
            self._ban_early_stop_(logits_nV[rows], drafted[rows], vocabulary)
            self._penalise_(logits_nV[rows], drafted[rows], vocabulary)

    def _remember(self, token_ids: Sequence[int]) -> None:
        if self._tail_length:
            self._tail = (*self._tail, *token_ids)[-self._tail_length :]
        if self._seen_V is not None and len(token_ids):
            self._seen_V[self._ids(token_ids)] = True

    def _add_bias_(self, logits_nV: Tensor, vocabulary: DraftVocabulary | None) -> None:
        if not self.params.logit_bias:
            return
        ids, values = self._bias_ids, self._bias_values
        if vocabulary is not None:
            columns = vocabulary.column_V[ids]
            is_drafted = columns < vocabulary.size
            ids, values = columns[is_drafted], values[is_drafted]
        logits_nV[:, ids] += values

    def _ban_words_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        if len(self._banned_ids):
            logits_nV.index_fill_(1, _columns(self._banned_ids, vocabulary), -math.inf)
        for row_V, tokens in zip(logits_nV, drafted, strict=True):
            history = (*self._tail, *tokens)
            ids = [word[-1] for word in self._long_words if _ends_with(history, word[:-1])]
            if ids:
                row_V.index_fill_(0, _columns(self._ids(ids), vocabulary), -math.inf)

    def _ban_early_stop_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        missing = self.params.min_tokens - self.num_answer
        if missing <= 0 or not len(self._stop_ids):
            return
        columns = _columns(self._stop_ids, vocabulary)
        for row_V, tokens in zip(logits_nV, drafted, strict=True):
            if len(tokens) < missing:
                row_V.index_fill_(0, columns, -math.inf)

    def _penalise_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        if self._seen_V is not None:
            seen_nV = _columns_of(self._in_round(self._seen_V, drafted) > 0, vocabulary)
            penalty = self.params.repetition_penalty
            penalised_nV = torch.where(logits_nV > 0, logits_nV / penalty, logits_nV * penalty)
            torch.where(seen_nV, penalised_nV, logits_nV, out=logits_nV)
        if self._counts_V is not None:
            counts_nV = _columns_of(self._in_round(self._counts_V, drafted), vocabulary)
            logits_nV -= counts_nV * self.params.frequency_penalty
            logits_nV -= (counts_nV > 0) * self.params.presence_penalty

    def _in_round(self, base_V: Tensor, drafted: Sequence[Sequence[int]]) -> Tensor:
        """`base_V` plus one at each token drafted before the row: float32 [n, V]."""
        counts_nV = base_V.to(torch.float32).repeat(len(drafted), 1)
        flat = [
            row * self._vocab_size + token
            for row, tokens in enumerate(drafted)
            for token in tokens
            if 0 <= token < self._vocab_size
        ]
        if flat:
            ids = self._ids(flat)
            counts_nV.view(-1).index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
        return counts_nV

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self._device)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{name} names token {token}, but the target's ids are 0..{vocab_size - 1}."
            )


def _columns(ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return ids if vocabulary is None else vocabulary.columns(ids)


def _columns_of(values_nV: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return values_nV if vocabulary is None else values_nV[:, vocabulary.d2t_S]


def _ends_with(history: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return history[-len(tokens) :] == tokens
