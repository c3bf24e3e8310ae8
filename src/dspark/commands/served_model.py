"""What `dspark serve` serves, in this process or in each of several."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from dspark.commands.shared import find_costs, working

if TYPE_CHECKING:
    from dspark.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, before it is loaded; it can travel to another process."""

    target: str
    drafter: str | None
    dtype: str | None
    device: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    is_compiled: bool
    threads: int | None
    max_requests: int
    page_size: int | None
    thinking: bool | None
    policy: str | None

    def load(self, console: Console) -> "tuple[LLM, str]":
        """The LLM with its engine built, and where its step costs come from."""
        from dspark import assembly

        with working(console, "loading the models"):
            llm = assembly.load_llm(**asdict(self))
        costs = find_costs(llm, console)
        llm.cycle(speculation=True)
        return llm, costs
