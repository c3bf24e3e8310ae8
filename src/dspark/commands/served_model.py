"""What `dspark serve` serves, in this process or in each of several."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

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
        from dspark.algorithms.policies import Adaptive, parse_policy

        with console.status("loading the models"):
            llm = assembly.load_llm(**asdict(self))
        costs = "no cost table is needed"
        if isinstance(parse_policy(llm.policy), Adaptive) and llm.drafter is not None:
            costs = "step costs from the cache"
            if llm.stored_step_cost() is None:
                costs = "step costs measured now"
                with console.status("measuring what steps cost on this machine, seconds"):
                    llm.step_cost()
        llm.cycle(speculation=True)
        return llm, costs
