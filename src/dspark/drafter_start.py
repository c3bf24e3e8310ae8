"""What a run of `dspark train` begins with: a trained drafter, or a new one for these answers.

It chooses a draft vocabulary and the weights before the first step; it trains nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.token_pairs import pair_bias
from dspark.data.answers import Answer
from dspark.data.batches import split_held_out, usable
from dspark.data.hidden_states import StatesSource
from dspark.data.remote_states import RemoteStates
from dspark.data.states_cache import StatesCache
from dspark.data.token_mass import select_vocabulary, token_mass
from dspark.drafter_shape import drafter_config
from dspark.errors import ModelError
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import Drafter
from dspark.models.heads import SequentialKind
from dspark.models.kinds import AnyDrafter, drafter_of
from dspark.models.target import Target
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer
from dspark.training.ranks import Ranks
from dspark.training.snapshot import read_snapshot, write_snapshot


def trained_drafter(path: Path, target: Target, tokenizer: Tokenizer) -> AnyDrafter:
    """A trained drafter to go on with, its weights trainable."""
    drafter = load_drafter(
        path,
        target,
        num_tokens=tokenizer.vocab_size,
        template_hash=tokenizer.template_hash,
    ).to(target.dtype)
    return drafter.requires_grad_()


def new_drafter(
    target: Target,
    tokenizer: Tokenizer,
    answers: Sequence[Answer],
    recipe: Recipe,
    work: Path,
    source: StatesSource,
    ranks: Ranks,
) -> AnyDrafter:
    """Random weights from the recipe's seed, and the run's draft vocabulary."""
    config = drafter_config(target, tokenizer, recipe)
    d2t_S = None
    if config.draft_vocab_size is not None:
        if ranks.rank == 0:
            _choose_vocabulary(config.draft_vocab_size, target, answers, work, source)
        ranks.wait()
        d2t_S = read_snapshot(work / "vocabulary.pt")["d2t_S"]
    drafter = drafter_of(
        config,
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        d2t_S=d2t_S,
        generator=torch.Generator().manual_seed(recipe.seed),
    )
    if recipe.pair_start:
        _start_from_pairs(drafter, answers, recipe)
    return drafter.to(target.dtype)


@torch.no_grad()
def _start_from_pairs(drafter: AnyDrafter, answers: Sequence[Answer], recipe: Recipe) -> None:
    """Put the pairs of the answers that are trained on into the sequential head.

    A small budget hardly moves rows of W1 that few slots read; counting takes a second.
    """
    train, _ = split_held_out(usable(answers), num_prompts=recipe.num_held_out, seed=recipe.seed)
    assert isinstance(drafter, Drafter), "only a block drafter has a sequential head"
    head = drafter.markov_head
    assert head is not None, "pair_start needs a sequential head"
    previous_N, next_N = _pairs(train)
    if drafter.d2t_S is not None:
        vocabulary = DraftVocabulary.of(drafter.d2t_S.cpu(), vocab_size=drafter.config.vocab_size)
        next_N = vocabulary.column_V[next_N]
        is_inside_N = next_N < vocabulary.size
        previous_N, next_N = previous_N[is_inside_N], next_N[is_inside_N]
    w1_Vr, w2_Sr = pair_bias(
        previous_N,
        next_N,
        vocab_size=drafter.config.vocab_size,
        draft_vocab_size=drafter.config.num_draft_tokens,
        rank=head.rank,
    )
    head.markov_w1.weight.copy_(w1_Vr)
    # A gate starts at a half, so its rows are doubled.
    head.markov_w2.weight.copy_(w2_Sr * (2.0 if head.kind is SequentialKind.GATED else 1.0))


def _pairs(answers: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """Tokens of answers, each with the one before it: [N] each."""
    previous: list[int] = []
    following: list[int] = []
    for answer in answers:
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        places = [place for place, kept in enumerate(answer.loss_mask().tolist()) if kept and place]
        previous += [ids[place - 1] for place in places]
        following += [ids[place] for place in places]
    return torch.tensor(previous), torch.tensor(following)


def _choose_vocabulary(
    size: int, target: Target, answers: Sequence[Answer], work: Path, source: StatesSource
) -> None:
    """Write the run's own map, once: chosen again, every row of W2 would mean another token.

    Another size is another map (UC-077).
    """
    file = work / "vocabulary.pt"
    work.mkdir(parents=True, exist_ok=True)
    if file.exists():
        found = read_snapshot(file)["d2t_S"]
        if len(found) == size:
            return
        if (work / "training.pt").exists():
            raise ModelError(
                f"{work} holds a run with a draft vocabulary of {len(found)} tokens, not {size}; "
                "use another --work directory, or delete it to start again."
            )
    if isinstance(source, StatesCache):
        mass_V = source.mass()
    else:
        remote = source if isinstance(source, RemoteStates) else None
        mass_V = token_mass(target, answers, source=remote)
    d2t_S = select_vocabulary(mass_V, size=size, always=target.spec.eos_ids)
    write_snapshot(file, {"d2t_S": d2t_S})
