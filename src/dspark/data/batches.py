"""Flat training batches: several sequences side by side, nothing padded, no empty block.

It knows answers and their states; it does not know the drafter's weights or the loss. Which
answers and anchors a step reads is a function of (seed, step) alone.

Letters: T context rows of all sequences, A blocks of the batch, N supervised slots.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dspark.algorithms import anchors
from dspark.data.answers import Answer
from dspark.data.hidden_states import States, StatesSource
from dspark.errors import InputError
from dspark.models.packed_attention import PackedBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything one forward and backward pass needs.

    `taps_TM` ends, for each sequence, before its last anchor: nothing later is ever seen; `ids_T`
    are the tokens there.
    `rows_N` are the supervised slots among the A * K flattened ones; `last_ND`, `lse_N` belong
    to those rows only.
    """

    taps_TM: Tensor
    ids_T: Tensor
    blocks: PackedBlocks
    previous_AK: Tensor
    labels_AK: Tensor
    valid_AK: Tensor
    rows_N: Tensor
    last_ND: Tensor
    lse_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """What a step reads."""

    block_size: int
    answers_per_step: int = 16
    micro_batches: int = 1
    """Parts that a step is computed in; the gradient is that of the whole step (UC-111)."""
    tokens_per_anchor: float = 3.5
    """One block per this many candidate positions, drawn anew at each visit."""
    num_held_out: int = 96
    """Prompts kept out of training, with all their answers."""
    repeats: tuple[tuple[str, int], ...] = ()
    """Domains whose answers come several times an epoch, and how often."""
    seed: int = 0

    def __post_init__(self) -> None:
        for domain, times in self.repeats:
            if times < 1:
                raise InputError(f"repeats of {domain!r} is {times}, but it must be at least 1.")
        for name in ("block_size", "answers_per_step", "micro_batches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}, but it must be at least 1.")
        if self.micro_batches > self.answers_per_step:
            raise InputError(
                f"micro_batches is {self.micro_batches}, but a step has only "
                f"{self.answers_per_step} answers."
            )
        if not self.tokens_per_anchor >= 1.0:  # nan too
            raise InputError(
                f"tokens_per_anchor is {self.tokens_per_anchor!r}, but it must be at least 1."
            )
        if self.num_held_out < 0:
            raise InputError(f"num_held_out is {self.num_held_out!r}, but it must not be negative.")


class AnswerBatches:
    """Batches of answers: training steps without end, and the held-out answers."""

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        source: StatesSource,
        config: BatchConfig,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Answers without a single block are left out and counted in `num_unusable`.

        Of each micro-batch this rank packs its share; all ranks together have what one would
        have alone. Raises `InputError` if nothing is left to train on.
        """
        self.config = config
        self._rank, self._num_ranks = rank, num_ranks
        self._source = source
        kept = usable(answers)
        self.num_unusable = len(answers) - len(kept)
        self.train, self.held_out_answers = split_held_out(
            kept, num_prompts=config.num_held_out, seed=config.seed
        )
        self._visits = visits([answer.domain for answer in self.train], config.repeats)
        self._order = Order(
            num_sequences=len(self._visits), per_step=config.answers_per_step, seed=config.seed
        )

    def step(self, step: int) -> list[Batch]:
        """Micro-batches of a step; sequence i of the step draws its anchors from (seed, step)."""
        generator = seeded(self.config.seed, 2 * step + 1)
        batches = list(self._packed(self._answers_of(step), self._part_size, generator))
        upcoming = self._answers_of(step + 1)
        for start in range(0, len(upcoming), self._part_size):
            part = upcoming[start : start + self._part_size]
            self._source.expect(part[self._mine(len(part))])
        return batches

    @property
    def _part_size(self) -> int:
        return math.ceil(self.config.answers_per_step / self.config.micro_batches)

    def _answers_of(self, step: int) -> list[Answer]:
        return [self.train[self._visits[place]] for place in self._order.sequences(step)]

    def _mine(self, count: int) -> slice:
        """This rank's share of a micro-batch, or its first answer for a rank without one."""
        mine = share(count, rank=self._rank, num_ranks=self._num_ranks)
        return mine if mine.start < mine.stop else slice(0, 1)

    def held_out(self) -> Iterator[Batch]:
        """The held-out answers, with the same anchors each time."""
        generator = seeded(self.config.seed, 0)
        return self._packed(self.held_out_answers, self.config.answers_per_step, generator)

    def fingerprint(self) -> Mapping[str, str]:
        """What must be the same for a resumed run to read the same batches."""
        ids = hashlib.sha256("\n".join(answer.id for answer in self.train).encode()).hexdigest()
        return {
            "set of answers": ids,
            "batch configuration": json.dumps(asdict(self.config), sort_keys=True),
        }

    def _packed(
        self, answers: Sequence[Answer], size: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        for start in range(0, len(answers), size):
            part = answers[start : start + size]
            drawn = [
                draw_blocks(
                    answer,
                    block_size=self.config.block_size,
                    tokens_per_anchor=self.config.tokens_per_anchor,
                    generator=generator,
                )
                for answer in part
            ]
            mine = share(len(part), rank=self._rank, num_ranks=self._num_ranks)
            chosen = self._mine(len(part))
            states = self._source.read(part[chosen])
            sequences = list(zip(drawn[chosen], states, strict=True))
            batch = pack(sequences, block_size=self.config.block_size)
            yield batch if chosen == mine else unsupervised(batch)


def visits(domains: Sequence[str], repeats: Sequence[tuple[str, int]]) -> list[int]:
    """Which answer each place of an epoch reads; an answer of a repeated domain has several.

    Raises `InputError` for a domain that no answer has.
    """
    times = dict(repeats)
    for domain in times:
        if domain not in domains:
            raise InputError(
                f"No answer is of domain {domain!r}, which is to be repeated; there are "
                f"{', '.join(map(repr, sorted(set(domains))))}."
            )
    return [i for i, domain in enumerate(domains) for _ in range(times.get(domain, 1))]


def share(count: int, *, rank: int, num_ranks: int) -> slice:
    """Which of `count` things are a rank's: all ranks' parts are disjoint and cover them."""
    return slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)


def unsupervised(batch: Batch) -> Batch:
    """The same blocks, teaching nothing: what a rank without a share works on.

    It takes part in every message between ranks and adds nothing (UC-120).
    """
    return replace(
        batch,
        valid_AK=torch.zeros_like(batch.valid_AK),
        rows_N=batch.rows_N[:0],
        last_ND=batch.last_ND[:0],
        lse_N=None if batch.lse_N is None else batch.lse_N[:0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which sequences each step reads: a new permutation an epoch, a function of (seed, step)."""

    num_sequences: int
    per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise InputError(
                "No answer is left to train on: none has two tokens in a row that are its own; "
                "check the answers file."
            )

    def sequences(self, step: int) -> list[int]:
        """Indices of the sequences of `step`; consecutive steps cover whole epochs."""
        first = step * self.per_step
        places = range(first, first + self.per_step)
        epochs = {place // self.num_sequences for place in places}
        shuffled = {epoch: self._permutation(epoch) for epoch in epochs}
        return [
            shuffled[place // self.num_sequences][place % self.num_sequences] for place in places
        ]

    def _permutation(self, epoch: int) -> list[int]:
        generator = seeded(self.seed, 2 * epoch)
        order: list[int] = torch.randperm(self.num_sequences, generator=generator).tolist()
        return order


def seeded(seed: int, number: int) -> torch.Generator:
    """A generator that is a function of (seed, number) alone."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number * 7919 + 17) % 2**63)


def usable(answers: Sequence[Answer]) -> list[Answer]:
    """The answers with at least one anchor, in their order (UC-099, UC-113)."""
    return [a for a in answers if anchors.candidates(a.loss_mask()).shape[0] > 0]


def split_held_out(
    answers: Sequence[Answer], *, num_prompts: int, seed: int
) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on, and all answers of `num_prompts` prompts, chosen by their hash.

    A conversation stays on one side: later turns go with its first prompt.

    Adding answers later moves a prompt from one side to the other only where its hash is among
    the smallest, so held-out figures stay comparable.
    """
    first_prompt = {a.conversation_id: a.prompt_token_ids for a in answers if a.turn == 0}
    prompts = [first_prompt.get(a.conversation_id, a.prompt_token_ids) for a in answers]
    ranks = [hashlib.sha256(f"{seed}:{list(ids)}".encode()).hexdigest() for ids in prompts]
    distinct = sorted(set(ranks))
    if answers and num_prompts >= len(distinct):
        raise InputError(
            f"num_held_out is {num_prompts}, but there are only {len(distinct)} prompts; "
            "hold out fewer or add answers."
        )
    kept_out = set(distinct[:num_prompts])
    train = [a for a, rank in zip(answers, ranks, strict=True) if rank not in kept_out]
    return train, [a for a, rank in zip(answers, ranks, strict=True) if rank in kept_out]


def draw_blocks(
    answer: Answer, *, block_size: int, tokens_per_anchor: float, generator: torch.Generator
) -> anchors.Blocks:
    """A fresh choice of anchors of one answer and what their blocks are taught."""
    mask_T = answer.loss_mask()
    candidates_C = anchors.candidates(mask_T)
    count = anchors.num_anchors(candidates_C.shape[0], tokens_per_anchor=tokens_per_anchor)
    chosen_R = anchors.choose(candidates_C, count=count, generator=generator)
    return anchors.blocks(answer.ids(), mask_T, chosen_R, block_size=block_size)


def pack(sequences: Sequence[tuple[anchors.Blocks, States]], *, block_size: int) -> Batch:
    """Lay sequences side by side; each sequence has at least one block.

    Lies where the states lie: ids and positions go to their device.
    """
    assert sequences, "a batch holds at least one sequence"
    device = sequences[0][1].taps_NM.device
    contexts = [int(blocks.anchors_R[-1]) for blocks, _ in sequences]
    valid_AK = torch.cat([blocks.valid_RK for blocks, _ in sequences]).to(device)
    last, lse = [], []
    for blocks, states in sequences:
        positions_n = blocks.positions_RK[blocks.valid_RK].to(device)
        last.append(states.last_ND[positions_n])
        if states.lse_N is not None:
            lse.append(states.lse_N[positions_n])
    packed = PackedBlocks(
        context_lengths=contexts,
        num_blocks=[blocks.anchors_R.shape[0] for blocks, _ in sequences],
        anchors_A=torch.cat([blocks.anchors_R for blocks, _ in sequences]).to(device),
        block_size=block_size,
    )
    return Batch(
        taps_TM=torch.cat(
            [s.taps_NM[:length] for (_, s), length in zip(sequences, contexts, strict=True)]
        ),
        ids_T=torch.cat([blocks.ids_C for blocks, _ in sequences]).to(device),
        blocks=packed,
        previous_AK=torch.cat([blocks.previous_RK for blocks, _ in sequences]).to(device),
        labels_AK=torch.cat([blocks.labels_RK for blocks, _ in sequences]).to(device),
        valid_AK=valid_AK,
        rows_N=valid_AK.flatten().nonzero().flatten(),
        last_ND=torch.cat(last),
        lse_N=torch.cat(lse) if len(lse) == len(sequences) else None,
    )
