"""The public face: load a target and its drafter, then generate. It knows no HTTP and no argv."""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from dspark import artifacts
from dspark.algorithms.calibration import Calibration
from dspark.algorithms.cost_faults import Fault, find_fault
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.policies import WHOLE_BLOCK, Adaptive, Baseline, FixedWidth, parse_policy
from dspark.algorithms.step_cost import StepCost
from dspark.completion import Answer, Completion, Job, Piece, Prompt
from dspark.core import FinishReason, Request, RoundResult, SamplingParams, resolve_dtype
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.engine.planner import FixedPlanner, Planner
from dspark.engine.profiler import ProfileConfig, profile
from dspark.engine.prompt_lookup import PromptLookup
from dspark.errors import InputError, ModelError
from dspark.kernels import extension
from dspark.kernels.linear import check_quantization
from dspark.machine import free_memory
from dspark.models.attention import resolve_kv_dtype
from dspark.models.checkpoint import check_folder, load_drafter, read_provenance
from dspark.models.embedded import DEFAULT_TARGET, is_embedded
from dspark.models.footprint import Footprint, check_memory
from dspark.models.kinds import AnyDrafter
from dspark.models.target import Target
from dspark.models.target_source import resolve_source
from dspark.text.detokenizer import Detokenizer
from dspark.text.grammar import GrammarCompiler
from dspark.text.tokenizer import Tokenizer

PROMPT_LOOKUP = "prompt-lookup"
"""The name of a drafter without weights."""


class LLM:
    """A target with its tokenizer and, if there is one, its drafter. Not safe for threads."""

    def __init__(
        self,
        target: Target,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: DraftSource | None = None,
        config: CycleConfig | None = None,
        quantization: str | None = None,
        thinking: bool | None = None,
        policy: str = "fixed",
        calibration: Calibration | None = None,
    ) -> None:
        """`quantization`: how the target's weights are stored.
        `thinking`: mode handed to the chat template, `None` leaves it to the template.
        `policy`: how much is verified, see `algorithms.policies`. `calibration`: of the drafter's
        confidences, `None` believes them as they are."""
        self.target = target
        self.thinking = thinking
        self.policy = policy
        self.calibration = calibration
        self._policy = parse_policy(policy)
        self._step_cost: StepCost | None = None
        self.drafter = drafter
        self.config = CycleConfig() if config is None else config
        self._tokenizer = tokenizer
        self._quantization = quantization
        self._cycles: dict[bool, Cycle] = {}
        self._grammars: GrammarCompiler | None = None
        self._num_requests = 0

    @classmethod
    def load(
        cls,
        target: str | Path = DEFAULT_TARGET,
        *,
        drafter: str | Path | None = "auto",
        dtype: str = "auto",
        device: str = "auto",
        compile: bool = True,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        config: CycleConfig | None = None,
        trust_remote_code: bool = False,
        thinking: bool | None = None,
        policy: str = "auto",
    ) -> "LLM":
        """Load everything from disk.

        `drafter`: a directory, `None` for plain decoding, "auto": the one shipped for this
        target, if there is one, or "prompt-lookup": what the request's own text
        repeats. `dtype`: see `core.resolve_dtype`. `quantization` of the target: int8 or
        `None`; the drafter is int8 beside bf16 in any case. `kv_cache_dtype` of the target's keys
        and values: auto, bf16 or int8 (see `models.attention.resolve_kv_dtype`).
        `thinking`: mode of chats, `None` leaves it to the template. `config`: sizes of the engine;
        `None` is one request after another and up to 16 together, with copies beside the drafter.
        `policy`: auto, none, fixed, fixed:K, mtp1, threshold:X or table:R=K,R=K; auto needs step
        costs, which are measured when it first drafts on this machine (seconds), and kept.
        Raises `ModelError` for what is missing or does not fit, `CapacityError` for what the
        memory cannot hold, `InputError` for a thinking mode of a template that has none.
        """
        torch_device = resolve_device(device)
        folder = resolve_source(target)
        config = CycleConfig(copies=True) if config is None else config
        shipped = shipped_drafter(target) if drafter == "auto" else drafter
        # what is known to be wrong is said before a target is loaded
        parse_policy(policy)
        check_quantization(quantization)
        if shipped is not None and shipped != PROMPT_LOOKUP:
            check_folder(shipped)
        arithmetic = resolve_dtype(dtype, by_operators=extension.multiplies_on(torch_device))
        kv_dtype = resolve_kv_dtype(
            kv_cache_dtype,
            dtype=arithmetic,
            quantization=quantization,
            device=torch_device,
            page_size=config.page_size,
        )
        _check_memory(
            folder,
            None if shipped in (None, PROMPT_LOOKUP) else str(shipped),
            dtype=arithmetic,
            kv_dtype=kv_dtype,
            device=torch_device,
            num_positions=config.num_positions,
        )
        loaded = Target.load(
            target,
            dtype=arithmetic,
            device=torch_device,
            compile=compile,
            quantization=quantization,
            kv_dtype=kv_dtype,
            trust_remote_code=trust_remote_code,
        )
        tokenizer = Tokenizer.load(folder)
        tokenizer.check_thinking(thinking)
        llm = cls(
            loaded,
            tokenizer=tokenizer,
            config=config,
            quantization=quantization,
            thinking=thinking,
            policy=policy,
        )
        return llm.with_drafter(shipped)

    def with_drafter(self, path: str | Path | None) -> "LLM":
        """The same target, not loaded again, with another drafter as `load` takes it, or none.

        Raises `ModelError` for a drafter that is missing or does not fit.
        """
        drafter: DraftSource | None = None
        calibration = None
        if path == PROMPT_LOOKUP:
            drafter = PromptLookup()
        elif path is not None:
            drafter = self._load_drafter(path)
            calibration = artifacts.read_calibration(Path(path))
            _compare_modes(path, self.thinking)
        return self._with(drafter, policy=self.policy, calibration=calibration)

    def with_policy(self, policy: str) -> "LLM":
        """The same target and drafter, not loaded again, with another policy as `load` takes it."""
        other = self._with(self.drafter, policy=policy, calibration=self.calibration)
        other._step_cost = self._step_cost
        return other

    def with_config(self, config: CycleConfig) -> "LLM":
        """The same target, drafter and policy, not loaded again, in an engine of other sizes."""
        other = self.with_policy(self.policy)
        other.config = config
        return other

    def _with(
        self, drafter: DraftSource | None, *, policy: str, calibration: Calibration | None
    ) -> "LLM":
        return LLM(
            self.target,
            tokenizer=self._tokenizer,
            drafter=drafter,
            config=self.config,
            quantization=self._quantization,
            thinking=self.thinking,
            policy=policy,
            calibration=calibration,
        )

    def _load_drafter(self, path: str | Path) -> AnyDrafter:
        tokenizer = self.tokenizer
        drafter = load_drafter(
            path,
            self.target,
            num_tokens=tokenizer.vocab_size,
            template_hash=tokenizer.template_hash,
        ).to(self.target.dtype)
        if self.target.device.type == "cpu":
            drafter.pack(quantization=self._drafter_quantization)
        return drafter

    @property
    def _drafter_quantization(self) -> str | None:
        """int8 beside a target of bf16 too: drafts are judged by the target, whatever made them,
        and weights of half the size are read in half the time. float32 stays as it was trained."""
        return "int8" if self.target.dtype == torch.bfloat16 else self._quantization

    @property
    def block_size(self) -> int:
        """K: tokens drafted in a round, at most; 0 without a drafter."""
        return block_size_of(self.drafter)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises `ModelError` if none was loaded."""
        if self._tokenizer is None:
            raise ModelError("No tokenizer is loaded; give token ids, or load with LLM.load.")
        return self._tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """Makes what `SamplingParams.grammar` takes. Raises `InputError` without xgrammar."""
        if self._grammars is None:
            spec = self.target.spec
            self._grammars = GrammarCompiler(
                self.tokenizer, vocab_size=spec.vocab_size, eos_ids=spec.eos_ids
            )
        return self._grammars

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        speculation: bool = True,
    ) -> list[Completion]:
        """All answers, in the order of the prompts, decoded as one continuous batch.

        `speculation` False runs the target alone, without any work for a drafter.
        """
        answers = {a.request.id: a for a in self._submit(prompts, params, speculation=speculation)}
        for answer, result in self._run(answers, speculation=speculation):
            answer.add(result, time.perf_counter())
        return [answer.completion() for answer in answers.values()]

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, speculation: bool = True
    ) -> Iterator[Piece]:
        """One answer round by round. Closing the iterator early ends the request."""
        answers = {a.request.id: a for a in self._submit([prompt], params, speculation=speculation)}
        if params.max_tokens == 0:
            yield Piece(text="", token_ids=(), origins=(), finish_reason=FinishReason.LENGTH)
        for answer, result in self._run(answers, speculation=speculation):
            text = answer.add(result, time.perf_counter())
            if result.token_ids:
                yield Piece(
                    text=text,
                    token_ids=result.token_ids,
                    origins=result.origins,
                    finish_reason=result.finish_reason,
                )

    def drain(
        self, take: Callable[[], Job | None], *, speculation: bool = True
    ) -> Iterator[tuple[Job, Completion]]:
        """Answer a line of jobs at full batch, each as it ends; for more prompts than fit at once.

        `take` gives the next job, or `None` when there is none for now; it is asked again after
        every step, and the work is over once it has none and nothing runs. Closing the iterator
        early ends what runs. Nothing else may be generated in between.
        """
        cycle = self.cycle(speculation=speculation)
        running: dict[str, tuple[Job, Answer]] = {}
        with self._leaving_nothing(cycle, running):
            while True:
                # twice the slots: who waits can start in the step after another one ends
                while len(running) < 2 * self.config.max_requests and (job := take()) is not None:
                    answer = self._answer(job.prompt, job.params)
                    cycle.submit(answer.request)
                    running[answer.request.id] = (job, answer)
                if not running:
                    return
                for result in cycle.step().rounds:
                    job, answer = running[result.request_id]
                    answer.add(result, time.perf_counter())
                    if result.finish_reason is not None:
                        del running[result.request_id]
                        yield job, answer.completion()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            return self.tokenizer.chat(messages, thinking=self.thinking)
        return [int(token) for token in cast(Sequence[int], prompt)]

    def cycle(self, *, speculation: bool) -> Cycle:
        """The engine behind `generate`; one with the drafter and one without, built when used."""
        has_drafter = speculation and self.drafter is not None
        if has_drafter not in self._cycles:
            self._cycles[has_drafter] = Cycle(
                self.target,
                drafter=self.drafter if has_drafter else None,
                config=self.config,
                make_stop_text=self._stop_text if self._tokenizer is not None else None,
                planner=self._planner() if has_drafter else None,
                clock=time.perf_counter,
            )
        return self._cycles[has_drafter]

    def forget_cycles(self) -> None:
        """Build the engines anew when they are next used; whatever runs in them is lost."""
        self._cycles.clear()

    def step_cost(
        self, *, is_new: bool = False, on_size: Callable[[int, int], None] | None = None
    ) -> StepCost:
        """What steps cost here: measured when first asked for, and kept in the cache.

        `is_new` measures again. Raises `ModelError` without a drafter.
        """
        if self._step_cost is None or is_new:
            if self.drafter is None:
                raise ModelError("Step costs need a drafter: plain decoding has nothing to choose.")
            found = None if is_new else self.stored_step_cost()
            if found is None:
                found = profile(
                    self.target,
                    self.drafter,
                    fingerprint=self._fingerprint(self.drafter),
                    config=ProfileConfig(max_requests=self.config.max_requests),
                    clock=time.perf_counter,
                    on_size=on_size,
                )
                artifacts.store_step_cost(found)
            self._step_cost = found
        return self._step_cost

    def stored_step_cost(self) -> StepCost | None:
        """What was measured here before, `None` if nothing was or there is no drafter."""
        if self.drafter is None:
            return None
        fingerprint = self._fingerprint(self.drafter)
        return artifacts.stored_step_cost(fingerprint, max_requests=self.config.max_requests)

    def _fingerprint(self, drafter: DraftSource) -> Fingerprint:
        return artifacts.fingerprint_of(self.target, drafter, quantization=self._quantization)

    def _planner(self) -> Planner | None:
        match self._policy:
            case FixedWidth(width=width) if width >= WHOLE_BLOCK:
                return None  # the configuration's own width
            case Adaptive():
                cost = self.step_cost()
                fault = find_fault(cost)
                if fault is not None and fault.fault is Fault.FLAT:
                    warnings.warn(
                        f"Verifying whole blocks, for the step costs are of no use: {fault.reason}",
                        stacklevel=2,
                    )
                    return None
                return AdaptivePlanner(
                    self._policy,
                    block_size=self.block_size,
                    cost=cost,
                    calibration=self.calibration,
                )
            case policy:
                self._tell_what_is_too_wide(policy)
                return FixedPlanner(policy)

    def _tell_what_is_too_wide(self, policy: Baseline) -> None:
        if isinstance(policy, FixedWidth) and 0 < self.block_size < policy.width:
            warnings.warn(
                f"policy is fixed:{policy.width}, but the drafter drafts {self.block_size} tokens "
                "a block; whole blocks are verified.",
                stacklevel=2,
            )

    def _stop_text(self, stop: Sequence[str]) -> Detokenizer:
        return Detokenizer(self.tokenizer, stop)

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        speculation: bool,
    ) -> list[Answer]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InputError(
                f"{len(prompts)} prompts came with {len(each)} sets of sampling parameters; "
                "give one set, or one for each prompt."
            )
        answers = [self._answer(p, options) for p, options in zip(prompts, each, strict=True)]
        cycle = self.cycle(speculation=speculation)
        submitted: list[str] = []
        try:
            for answer in answers:
                if answer.request.params.max_tokens > 0:
                    cycle.submit(answer.request)
                    submitted.append(answer.request.id)
        except InputError:
            for request_id in submitted:  # all or nothing
                cycle.abort(request_id)
            raise
        return answers

    def _answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        self._num_requests += 1
        return Answer(
            request=Request(
                id=f"r{self._num_requests}", prompt_ids=self.prompt_ids(prompt), params=params
            ),
            detokenizer=self._stop_text(params.stop) if self._tokenizer else None,
            started_s=time.perf_counter(),
        )

    def _run(
        self, answers: Mapping[str, Answer], *, speculation: bool
    ) -> Iterator[tuple[Answer, RoundResult]]:
        cycle = self.cycle(speculation=speculation)
        running = {a.request.id for a in answers.values() if a.request.params.max_tokens > 0}
        with self._leaving_nothing(cycle, running):
            while running:
                for result in cycle.step().rounds:
                    if result.finish_reason is not None:
                        running.discard(result.request_id)
                    yield answers[result.request_id], result

    @contextmanager
    def _leaving_nothing(self, cycle: Cycle, running: Collection[str]) -> Iterator[None]:
        """However the steps end, nothing of `running`, which shrinks meanwhile, stays behind."""
        try:
            yield
        except ArithmeticError:
            self.forget_cycles()  # the step broke off; pages of its requests are in no known state
            raise
        finally:
            for request_id in running:
                cycle.abort(request_id)


def _check_memory(
    target: str,
    drafter: str | None,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
) -> None:
    found = [Footprint.of(target, name=target, dtype=dtype, kv_dtype=kv_dtype)]
    if drafter is not None:
        found.append(Footprint.of(drafter, name=drafter, dtype=dtype))
    check_memory(
        [footprint for footprint in found if footprint is not None],
        num_positions=num_positions,
        free_bytes=free_memory(device),
        device=str(device),
    )


def _compare_modes(path: str | Path, thinking: bool | None) -> None:
    origin = read_provenance(path)
    if origin is not None and origin.thinking != thinking:
        warnings.warn(
            f"The drafter {path} learnt answers with thinking mode {origin.thinking}, and now it "
            f"is {thinking}; it will accept less (None: the template's default).",
            stacklevel=2,
        )


def shipped_drafter(target: str | Path) -> Path | None:
    """The directory of the drafter that comes with this program for a target, if any."""
    if not is_embedded(str(target)):  # a path would lead out of the folder of drafters
        return None
    package = Path(__file__).resolve().parent
    for place in (package, package.parents[1]):  # installed; a checkout
        folder = place / "drafters" / str(target)
        if (folder / "config.json").is_file():
            return folder
    return None


def resolve_device(device: str) -> torch.device:
    """`cpu`, `cuda`, or `auto`: a GPU where there is one. Raises `InputError` for others."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise _unknown_device(device) from error
    if resolved.type not in ("cpu", "cuda"):
        raise _unknown_device(device)
    num_devices = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= num_devices:
        raise InputError(
            f"device is {device!r}, but this machine shows {num_devices} CUDA devices; use cpu"
            + (f" or cuda:0..{num_devices - 1}." if num_devices else ".")
        )
    return resolved


def _unknown_device(name: str) -> InputError:
    return InputError(f"device is {name!r}, but it must be cpu, cuda or auto.")
