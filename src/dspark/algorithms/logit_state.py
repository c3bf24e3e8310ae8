"""What one request's options do to logits before temperature: bias, bans, penalties, grammar.
It knows the request's own history and no other request; temperature and filters come later.

Row j of a round stands after the committed answer AND the j tokens drafted before it, so every
rule here takes that drafted prefix. Letters: n rows of one request, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.grammar_cursor import GrammarCursor
from dspark.core import SamplingParams
from dspark.errors import InputError


class LogitState:
    """The history of one request as far as its options look at it; `commit` moves it forward.

    Nothing here is as large as the vocabulary: a rule costs what its tokens cost.
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
        """Raises `InputError` for an option that names a token outside the vocabulary, and for a
        grammar of another vocabulary."""
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
        self.stop_ids = tuple(sorted(stop_ids | set(params.stop_token_ids)))
        """What ends the answer, and is impossible before `min_tokens` of it."""
        self._stop_ids = self._ids(self.stop_ids)
        self._tail_length = max((len(word) - 1 for word in self._long_words), default=0)
        self._tail: tuple[int, ...] = ()
        self._has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        # Tokens that a penalty can touch, in the order of their first use: where each of them
        # stands in that order, and how often the answer holds it.
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._known: tuple[Tensor, Tensor] | None = None  # ids and counts as tensors, when asked
        self._grammar: GrammarCursor | None = None
        if params.grammar is not None:
            _check_size(params.grammar.vocab_size, vocab_size)
            self._grammar = GrammarCursor(params.grammar.matcher(), device=device)
        if params.repetition_penalty != 1.0:
            self._count(prompt_ids, by=0)
        self.has_rules = bool(
            params.logit_bias
            or params.bad_words
            or self._has_penalties
            or self._grammar is not None
        )
        """Whether anything but `min_tokens` changes logits."""
        self._remember(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed tokens to the answer."""
        self.num_answer += len(token_ids)
        self._remember(token_ids)
        if self._has_penalties:
            self._count(token_ids, by=1)
        if self._grammar is not None:
            self._grammar.commit(token_ids)

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that the grammar allows next, up to the one that ends it."""
        if self._grammar is None:
            return len(token_ids)
        with self._named():
            return self._grammar.num_allowed(token_ids)

    def grammar_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the target's own tokens belong to the answer if its grammar ends among them;
        `None` if it goes on."""
        return None if self._grammar is None else self._grammar.end(token_ids)

    @property
    def shapes_logits(self) -> bool:
        """Whether any rule here can still change a logit."""
        return self.num_answer < self.params.min_tokens or self.has_rules

    @property
    def num_early(self) -> int:
        """Tokens that must come before one of `stop_ids`."""
        return max(0, self.params.min_tokens - self.num_answer)

    def shape_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        """Applies the rules in place: bias, bad words, min_tokens, penalties, grammar.

        `logits_nV` float32; with a `vocabulary` its columns are the drafter's. `drafted[j]` are
        the tokens drafted before row j in this round; invalid ids among them are passed over.
        """
        self._add_bias_(logits_nV, vocabulary)
        self._ban_words_(logits_nV, drafted, vocabulary)
        self._ban_early_stop_(logits_nV, drafted, vocabulary)
        if self._has_penalties:
            self._penalise_(logits_nV, drafted, vocabulary)
        if self._grammar is not None:
            with self._named():
                _forbid_(logits_nV, self._grammar, drafted, vocabulary)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A matcher is another library's: what fails there ends this request and no other."""
        try:
            yield
        except RuntimeError as error:
            raise InputError(
                f"The grammar of request {self.request_id!r} failed ({error}); simplify it.",
                request_id=self.request_id,
            ) from error

    def _remember(self, token_ids: Sequence[int]) -> None:
        if self._tail_length:
            self._tail = (*self._tail, *token_ids)[-self._tail_length :]

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
        if self.num_early == 0 or not self.stop_ids:
            return
        columns = _columns(self._stop_ids, vocabulary)
        for row_V, tokens in zip(logits_nV, drafted, strict=True):
            if len(tokens) < self.num_early:
                row_V.index_fill_(0, columns, -math.inf)

    def _penalise_(
        self,
        logits_nV: Tensor,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        known_ids_U, known_counts_U = self._known_tensors()
        num_known = len(known_ids_U)
        in_round = [(row, t) for row, ts in enumerate(drafted) for t in ts if self._is_id(t)]
        new = list(dict.fromkeys(t for _, t in in_round if t not in self._places))
        places = {token: num_known + i for i, token in enumerate(new)}
        ids_U = torch.cat([known_ids_U, self._ids(new)])
        counts_nU = torch.zeros((len(drafted), len(ids_U)), device=self._device)
        counts_nU[:, :num_known] = known_counts_U
        flat = self._ids(
            row * len(ids_U) + (self._places[t] if t in self._places else places[t])
            for row, t in in_round
        )
        counts_nU.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
        # All tokens known before the round, those of the prompt with a count of 0 included.
        is_seen_nU = counts_nU > 0
        is_seen_nU[:, :num_known] = True
        if vocabulary is not None:
            ids_U = vocabulary.column_V[ids_U]
            is_column_U = ids_U < vocabulary.size
            ids_U = ids_U[is_column_U]
            counts_nU, is_seen_nU = counts_nU[:, is_column_U], is_seen_nU[:, is_column_U]
        values_nU = logits_nV[:, ids_U]
        penalty = self.params.repetition_penalty
        repeated_nU = torch.where(values_nU > 0, values_nU / penalty, values_nU * penalty)
        values_nU = torch.where(is_seen_nU, repeated_nU, values_nU)
        values_nU -= counts_nU * self.params.frequency_penalty
        values_nU -= (counts_nU > 0) * self.params.presence_penalty
        logits_nV[:, ids_U] = values_nU

    def _count(self, token_ids: Sequence[int], *, by: int) -> None:
        for token in token_ids:
            place = self._places.setdefault(token, len(self._counts))
            if place == len(self._counts):
                self._counts.append(0)
            self._counts[place] += by
        self._known = None

    def _known_tensors(self) -> tuple[Tensor, Tensor]:
        if self._known is None:
            counts_U = torch.tensor(self._counts, dtype=torch.float32, device=self._device)
            self._known = (self._ids(self._places), counts_U)
        return self._known

    def _is_id(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self._device)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{name} names token {token}, but the target's ids are 0..{vocab_size - 1}."
            )


def _check_size(num_known: int, vocab_size: int) -> None:
    if num_known != vocab_size:
        raise InputError(
            f"The grammar was made for {num_known} tokens, but the target has {vocab_size}; make "
            "it for this target."
        )


def _forbid_(
    logits_nV: Tensor,
    grammar: GrammarCursor,
    drafted: Sequence[Sequence[int]],
    vocabulary: DraftVocabulary | None,
) -> None:
    for row_V, tokens in zip(logits_nV, drafted, strict=True):
        bans_V = grammar.bans(tokens)
        if bans_V is not None:
            row_V += bans_V if vocabulary is None else bans_V[vocabulary.d2t_S]


def _columns(ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return ids if vocabulary is None else vocabulary.columns(ids)


def _ends_with(history: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return history[-len(tokens) :] == tokens
