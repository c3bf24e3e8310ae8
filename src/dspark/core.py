"""The nouns that two packages agree on. It knows no model, no tensor library device, no text.

Shape letters used in tensor names across the repository (logical dimensions):
    N flattened tokens of a step      R requests of a step      K block_size (drafted tokens)
    V target vocabulary               S draft vocabulary        D hidden size
    H attention heads                 G key/value heads         E head size
    P pages of one request            M tapped layers times D   L layers
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from dspark.errors import InputError


class Coupling(StrEnum):
    """How a draft token and the target's token are drawn together (method section 4)."""

    MAXIMAL = "maximal"
    SHARED_NOISE = "shared-noise"


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API, `CONTEXT` reads as `length`."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ABORT = "abort"


class Origin(StrEnum):
    """How a committed token came to be."""

    PLAIN = "plain"  # no token was drafted for this position
    ACCEPTED = "accepted"  # drafted and accepted
    COPIED = "copied"  # copied from the request's own text, beside a drafter, and accepted
    CORRECTED = "corrected"  # drafted, rejected, replaced from the residual
    BONUS = "bonus"  # the target's own token after a fully accepted window


class GrammarMatcher(Protocol):
    """Where one answer stands in a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer ended; then nothing is asked but `roll_back`."""

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V]; EOS only where the grammar may end."""

    def accept(self, token_id: int) -> bool:
        """Move on by a token; False: it may not come here, and nothing changed."""

    def roll_back(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""


class Grammar(Protocol):
    """What an answer must look like; unchanging, shared by requests (`text.grammar` makes some)."""

    @property
    def vocab_size(self) -> int:
        """V of the masks."""

    def matcher(self) -> GrammarMatcher:
        """For a new answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of each token. Every field is validated here and nowhere else."""

    temperature: float = 1.0
    """0 is greedy: the limit of sampling, a one-hot distribution (ties: lowest token id)."""
    top_k: int | None = None
    """Keep the k most likely tokens; `None`: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer already contains."""
    frequency_penalty: float = 0.0
    """Subtracted once for each earlier occurrence in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a value added to its logit."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that may not be completed."""
    min_tokens: int = 0
    """EOS and stop token ids are impossible before this many tokens of the answer."""
    max_tokens: int = 256
    """Tokens of the answer, at most; 0 runs no model."""
    stop: Sequence[str] = ()
    """The answer ends before the first of these strings."""
    stop_token_ids: Sequence[int] = ()
    """The answer ends after one of these tokens, besides the model's own EOS list."""
    ignore_eos: bool = False
    """Go on after the model's EOS tokens (`stop_token_ids` still end the answer)."""
    grammar: Grammar | None = None
    """Tokens that it does not allow are impossible; the answer ends where the grammar does."""
    seed: int | None = None
    """With a seed the text is a function of (seed, prompt, target) alone."""
    num_logprobs: int | None = None
    """Log-probabilities of the chosen and of this many most likely tokens; `None` for none."""
    max_draft: int | None = None
    """Drafted tokens verified in a round, at most, 0 being plain decoding; `None`: no cap."""
    min_tokens_per_s: float = 0.0
    """Speed that the answer shall have at least, where any budget gives it; 0 asks for none."""
    coupling: Coupling | None = None
    """How draft and target are drawn together, maximal or shared-noise; `None`: shared-noise with a
    seed, otherwise maximal."""

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "be a finite number of at least 0",
        )
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "be at least 1")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "lie in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "lie in [0, 1]")
        _require(
            0.0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            self.repetition_penalty,
            "be above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "lie in [-2, 2]")
        for token, bias in self.logit_bias.items():
            _require(token >= 0 and not math.isnan(bias), f"logit_bias[{token}]", bias, "be valid")
        for words in self.bad_words:
            _require(len(words) > 0, "bad_words", words, "hold no empty sequence")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "be at least 0")
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "be at least 0")
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"not be above max_tokens, which is {self.max_tokens}",
        )
        for text in self.stop:
            _require(text != "", "stop", text, "hold no empty string")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "lie in [0, 2^63)")
        _require(
            self.num_logprobs is None or 0 <= self.num_logprobs <= 20,
            "num_logprobs",
            self.num_logprobs,
            "lie in 0..20",
        )
        _require(
            self.max_draft is None or self.max_draft >= 0, "max_draft", self.max_draft, "be >= 0"
        )
        _require(
            0.0 <= self.min_tokens_per_s < math.inf,
            "min_tokens_per_s",
            self.min_tokens_per_s,
            "be at least 0",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one; temperatures below 1e-5 count as 0."""
        return self.temperature < 1e-5

    @property
    def effective_coupling(self) -> Coupling:
        """The coupling in force, the default resolved."""
        if self.coupling is not None:
            return self.coupling
        return Coupling.MAXIMAL if self.seed is None else Coupling.SHARED_NOISE


def _require(is_valid: bool, name: str, value: object, rule: str) -> None:
    if not is_valid:
        raise InputError(f"{name} is {value!r}, but it must {rule}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to produce: token ids in, token ids out."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """What the drafter proposes for R requests in one round; row r belongs to slot r of the step.

    `tokens_RK` int64, TARGET ids. `probs_RKS` float32: the very distributions the tokens were
    drawn from (method section 4: the same tensor serves drawing and ratio), over the draft
    vocabulary; `None` where no request uses maximal coupling, which alone asks for them.
    `confidence_RK` float32 logits of c_k, a head's or `algorithms.confidence`'s; they never look
    at a token that they judge. `None`: nothing is known. `num_offered` says how many leading
    tokens of each row are proposals; `None`: all K of every row. `is_certain`: no token was
    drawn, each has probability 1 (then `probs_RKS` is `None`).
    """

    tokens_RK: Tensor
    probs_RKS: Tensor | None
    confidence_RK: Tensor | None
    num_offered: Sequence[int] | None = None
    is_certain: bool = False
    is_copied: Sequence[bool] | None = None
    """Rows whose tokens were copied from the request's own text beside a drafter (then
    `confidence_RK` is what such copies were worth, and asks for no calibration); `None`: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """How many drafted tokens of each request are verified: `lengths[r]` in 0..K."""

    lengths: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities of one position, after the request's own processing."""

    chosen: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one round committed for one request."""

    request_id: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    logprobs: Sequence[TokenLogprobs] | None
    num_offered: int
    """Drafted tokens."""
    num_planned: int
    """Drafted tokens that were verified."""
    num_accepted: int
    """Drafted tokens that were committed."""
    is_prefill: bool
    """The first token of the answer: the prompt's own pass gave it, it is not a round."""
    finish_reason: FinishReason | None
    confidence_logits: Sequence[float] | None = None
    """Logits of c_k of the offered tokens; `None` without any."""
    num_cached: int = 0
    """Tokens of the prompt that the cache knew; told with the first token of the answer."""
    offered_ids: Sequence[int] = ()
    """The drafted tokens, verified or not."""
    is_copied: bool = False
    """Whether they were copied from the request's own text and not drawn by the drafter."""

    @property
    def num_verified(self) -> int:
        """Drafted tokens that were verified and do not stand behind the end of the answer.

        An answer that ended inside the window has no token of the target's own.
        """
        is_cut = len(self.token_ids) == self.num_accepted
        return self.num_accepted if is_cut else self.num_planned


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did for the whole batch."""

    rounds: Sequence[RoundResult]
    num_prompt_tokens: int
    num_verify_tokens: int
    """Anchors plus planned drafts that went through the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Who sits where in a step of N tokens over paged keys and values.

    Positions of request r live in pages `block_tables_RP[r]`: position i in page
    `block_tables_RP[r, i // page_size]`, row `i % page_size`. Tokens of one request are
    contiguous in the flattened order. A token sees positions `[max(0, low), visible)` of its
    own request, where `low = position + 1 - window` if the layer has a window, else 0.
    """

    block_tables_RP: Tensor  # int32
    query_starts_R1: Tensor  # int32 [R + 1], first flattened token of each request
    visible_N: Tensor  # int32, positions of its request that a token sees (exclusive end)
    positions_N: Tensor  # int64, the token's own position
    slots_N: Tensor  # int64, page * page_size + row, where the token's own K/V is written
    max_visible: int
    """Largest entry of `visible_N`, known on the host."""


def resolve_dtype(name: str, *, by_operators: bool = False) -> torch.dtype:
    """`bf16`, `fp32`, or `auto`: bf16 where it is fast, else fp32.

    PyTorch's products of bf16 are fast where the processor has instructions for them. Where the
    C++ operators multiply, `by_operators`, they are fast everywhere: weights are read at half the
    bytes, and widened in registers where there is no such instruction. Raises `InputError` for
    other names.
    """
    match name:
        case "bf16" | "bfloat16":
            return torch.bfloat16
        case "fp32" | "float32":
            return torch.float32
        case "auto":
            return torch.bfloat16 if by_operators or _has_bf16() else torch.float32
        case _:
            raise InputError(f"dtype is {name!r}, but it must be bf16, fp32 or auto.")


def _has_bf16() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    found = torch.cpu.get_capabilities()
    if found["architecture"] == "x86_64":  # oneDNN calls bf16 supported where it emulates it
        return bool(found["avx512_bf16"])
    # PyTorch for macOS is built without oneDNN, and has no such operator then.
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and bool(asked())
