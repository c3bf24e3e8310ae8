"""Conversations that are sent to a server as they are: of a file, or built in. No tokens here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.benchmarks.workload import Prompt, demo_prompts, many_prompts
from dspark.data.prompts import read_prompts

Chat = Sequence[Mapping[str, str]]
_NUM_BUILT_IN = 15


def chats_of(path: Path | None, *, limit: int | None) -> list[Chat]:
    """First turns of the prompts of `path` (`data.prompts` reads ShareGPT and others).

    The built-in ones are 15. Raises `InputError` where nothing is usable.
    """
    if path is not None:
        return [prompt.as_chat() for prompt in read_prompts(path, limit=limit).prompts]
    number = _NUM_BUILT_IN if limit is None else max(1, min(limit, _NUM_BUILT_IN))
    return _chats(demo_prompts(number))


def many_chats(num_prompts: int) -> list[Chat]:
    """So many questions of ordinary text (`workload.many_prompts`)."""
    return _chats(many_prompts(num_prompts))


def _chats(prompts: Sequence[Prompt]) -> list[Chat]:
    return [[{"role": "user", "content": prompt.text}] for prompt in prompts]
