"""Puts engines, prompts and places together for the commands that compare with other engines.

It knows no argv; how engines race is in `benchmarks.race`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.algorithms.policies import parse_policy
from dspark.benchmarks.client_prompts import chats_of, many_chats
from dspark.benchmarks.peers import FAMILIES, Engine, Ours, chosen_peers, our_engines
from dspark.benchmarks.race import Places
from dspark.errors import InputError
from dspark.llm import PROMPT_LOOKUP
from dspark.models.checkpoint import check_folder
from dspark.models.target_source import resolve_source
from dspark.options import given
from dspark.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceEntry:
    """Who runs against whom on which prompts."""

    engines: Sequence[Engine]
    prompts: Sequence[Sequence[int]]
    source: str
    places: Places


def race_entry(
    *,
    target: str | None,
    drafter: str | None,
    arithmetics: Sequence[str],
    peers: Sequence[str],
    pythons: Sequence[str],
    prompts: Path | None,
    num_prompts: int,
    policy: str | None = None,
) -> RaceEntry:
    """What the options of the comparing commands mean; `pythons` are texts like "vllm=/a/python".

    Prompts go through the target's chat template once and reach every engine as ids.
    """
    ours = Ours(**given(target=target, drafter=drafter, arithmetics=arithmetics, policy=policy))
    engines = [*our_engines(ours), *chosen_peers(peers)]
    if policy is not None:  # what is known to be wrong is said before an engine starts
        parse_policy(policy)
    if drafter not in (None, "auto", "none", PROMPT_LOOKUP):
        check_folder(str(drafter))
    given_pythons = dict(_python_of(text) for text in pythons)
    tokenizer = Tokenizer.load(resolve_source(ours.target))
    chats = many_chats(num_prompts)
    if prompts is not None:
        chats = chats_of(prompts, limit=num_prompts)
    return RaceEntry(
        engines=engines,
        prompts=[tokenizer.chat(chat) for chat in chats],
        source=ours.target,
        places=Places(pythons=given_pythons),
    )


def _python_of(text: str) -> tuple[str, Path]:
    name, sign, path = text.partition("=")
    if name not in FAMILIES or not sign:
        raise InputError(
            f"peer-python is {text!r}, but it must be one of {', '.join(FAMILIES)}, a sign =, and "
            "the path of a Python."
        )
    return name, Path(path)
