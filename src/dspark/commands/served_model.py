"""What `dspark serve` serves, in this process or in each of several."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import find_costs

if TYPE_CHECKING:
    from dspark.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, before it is loaded; it can travel to another process."""

    options: ModelOptions
    max_requests: int
    page_size: int | None
    thinking: bool | None

    def load(self, console: Console) -> "tuple[LLM, str]":
        """The LLM with its engine built, and where its step costs come from."""
        llm = self.options.load(
            console,
            max_requests=self.max_requests,
            page_size=self.page_size,
            thinking=self.thinking,
        )
        costs = find_costs(llm, console)
        llm.cycle(speculation=True)
        return llm, costs
