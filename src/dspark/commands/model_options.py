"""The model of a command: its options, spelt once, and how they are loaded. It prints no result."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import Drafter, Dtype, Eager, Policy, Target, Threads
from dspark.commands.shared import working

if TYPE_CHECKING:
    from dspark.llm import LLM
    from dspark.models.target import Target as LoadedTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A bundle (`commands.bundles`); `None` leaves a value to `LLM.load`."""

    target: Target = None
    drafter: Drafter = None
    dtype: Dtype = None
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, or auto.", show_default="auto", rich_help_panel="Model"),
    ] = None
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8 stores the weights in 8 bits.",
            show_default="weights as they are",
            rich_help_panel="Model",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="Keys and values of the target: int8, bf16 (the arithmetic's own), or auto.",
            show_default="auto",
            rich_help_panel="Model",
        ),
    ] = None
    eager: Eager = False
    threads: Threads = None
    policy: Policy = None
    copies: Annotated[
        bool,
        typer.Option(
            help="Beside a drafter, propose what followed the same words earlier in the text.",
            rich_help_panel="Model",
        ),
    ] = True

    def load(
        self,
        console: Console,
        *,
        max_requests: int | None = None,
        page_size: int | None = None,
        thinking: bool | None = None,
        must_draft: bool = False,
    ) -> "LLM":
        """The target with its drafter; says that this takes its time.

        With `must_draft` the lack of a drafter is told before.
        """
        from dspark import assembly

        if must_draft:
            assembly.check_drafters(self.target, [self.drafter or "auto"])
        assembly.set_threads(self.threads)  # what cannot be is told before anything else
        words = "loading the model" if self.drafter == "none" else "loading the models"
        with working(console, words):
            return assembly.load_llm(
                target=self.target,
                drafter=self.drafter,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization,
                kv_cache_dtype=self.kv_cache_dtype,
                is_compiled=not self.eager,
                threads=self.threads,
                max_requests=max_requests,
                page_size=page_size,
                thinking=thinking,
                policy=self.policy,
                copies=self.copies,
            )

    def load_target(self, *, is_packed: bool = True) -> "LoadedTarget":
        """The target alone, on the CPU; it has no `device`, `drafter` and `policy`."""
        from dspark import assembly

        return assembly.load_target(
            target=self.target,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            is_compiled=not self.eager,
            is_packed=is_packed,
            threads=self.threads,
        )
