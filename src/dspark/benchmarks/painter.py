"""Answers as a person sees them: text coloured by how each token came to be, a line of figures.

It decides nothing about how answers are made.
"""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dspark.completion import Piece
from dspark.core import Origin, SamplingParams
from dspark.llm import LLM
from dspark.text.detokenizer import Detokenizer
from dspark.text.tokenizer import Tokenizer

_STYLES = {
    Origin.ACCEPTED: "green",
    Origin.COPIED: "yellow",
    Origin.CORRECTED: "red",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "",
}


class Painter:
    """Turns the pieces of one answer into text coloured by how each token came to be."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, stop)

    def paint(self, piece: Piece) -> Text:
        """The printable part of a piece; a character takes the colour of its last token."""
        text = Text()
        origin = Origin.PLAIN
        for token_id, origin in zip(piece.token_ids, piece.origins, strict=True):
            text.append(self._detokenizer.push([token_id]), _STYLES[origin])
        if piece.finish_reason is not None:
            text.append(self._detokenizer.flush(), _STYLES[origin])
        return text


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("drafted and accepted", "green"), "  ", ("copied from its own text", "yellow"), "  ",
        ("corrected", "red"), "  ",
        ("the target's own after a full block", "cyan"), "  plain",
    )  # fmt: skip


def stream_answer(
    console: Console,
    figures: Console,
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    shows_origins: bool,
) -> None:
    """Print an answer while it grows, then its speed in one line of its own."""
    painter = Painter(llm.tokenizer, stop=params.stop)
    started, num_tokens, num_rounds = time.perf_counter(), 0, 0
    for piece in llm.stream(prompt_ids, params):
        text = painter.paint(piece) if shows_origins else Text(piece.text)
        console.print(text, end="", soft_wrap=True, highlight=False)
        num_tokens += len(piece.token_ids)
        num_rounds += 1
    seconds = time.perf_counter() - started
    console.print()
    figures.print(
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, "
        f"{num_tokens / max(num_rounds, 1):.2f} tokens a step"
        + ("" if llm.block_size else ", no drafter"),
        style="dim",
        highlight=False,
    )


def answer_json(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """One answer as the keys of a `--json` line."""
    started = time.perf_counter()
    completion = llm.generate([prompt_ids], params)[0]
    seconds = time.perf_counter() - started
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "origins": [origin.value for origin in completion.origins],
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "tau": completion.stats.tau,
        "seconds": seconds,
    }
