"""A conversation at a terminal: history, commands, streaming, an answer that Ctrl-C can stop.

It knows how to talk with a person; how the answers are made it leaves to the LLM.
"""

from collections.abc import Callable, Generator
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from dspark.benchmarks.painter import Painter, legend
from dspark.completion import Piece
from dspark.core import SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM

HELP = "/reset forgets the conversation, /exit ends it, /help says this; Ctrl-C stops an answer."


class Conversation:
    """The messages so far and how the next answer is sampled."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        speculation: bool = True,
    ) -> None:
        self.llm = llm
        self.params = params
        self._speculation = speculation
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Stream the answer and remember what was shown of it, also if the caller stops early.

        Raises `InputError`, the conversation unchanged, for what does not fit into the context.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self.llm.prompt_ids(asked)
        shown: list[str] = []
        stream = self.llm.stream(
            prompt_ids, self._fitting(prompt_ids), speculation=self._speculation
        )
        try:
            for piece in stream:
                shown.append(piece.text)
                yield piece
        finally:
            if shown:
                self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]

    def _fitting(self, prompt_ids: list[int]) -> SamplingParams:
        room = self.llm.target.spec.max_positions - len(prompt_ids)
        if room < 1:
            raise InputError(
                f"The conversation has {len(prompt_ids)} tokens and the target takes "
                f"{self.llm.target.spec.max_positions}; start anew with /reset."
            )
        return replace(self.params, max_tokens=min(self.params.max_tokens, room))


def run(
    conversation: Conversation,
    *,
    console: Console,
    read: Callable[[], str],
    shows_origins: bool,
) -> None:
    """Talk until /exit or the end of the input. `read` gives one line of the person."""
    console.print(HELP, style="dim", highlight=False)
    if shows_origins:
        console.print(legend())
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n(/exit ends the conversation)", style="dim")
            continue
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                console.print("The conversation starts anew.", style="dim")
            case "/help":
                console.print(HELP, style="dim", highlight=False)
            case _ if line.startswith("/"):
                console.print(f"{line} is no command. {HELP}", style="dim", highlight=False)
            case _:
                _answer(conversation, line, console=console, shows_origins=shows_origins)


def _answer(
    conversation: Conversation, line: str, *, console: Console, shows_origins: bool
) -> None:
    painter = Painter(conversation.llm.tokenizer, stop=conversation.params.stop)
    stream = conversation.ask(line)
    try:
        for piece in stream:
            text = painter.paint(piece) if shows_origins else Text(piece.text)
            console.print(text, end="", soft_wrap=True, highlight=False)
    except KeyboardInterrupt:
        console.print(" (stopped)", style="dim", end="")
    except InputError as error:
        console.print(str(error), style="red", highlight=False)
    finally:
        stream.close()
    console.print()
