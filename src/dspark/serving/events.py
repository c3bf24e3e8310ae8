"""The live feed: what every step did, for whoever watches at /live/events.

Server-sent events, each `data:` one JSON object. Nothing is built while nobody listens; a listener
that reads too slowly loses steps (`dropped` says how many), never the engine's time.

First a `hello`, once:

    {"type": "hello", "model": "smollm2-135m", "drafter": "dspark", "policy": "auto",
     "block_size": 7, "max_requests": 16}
        drafter: its kind, "prompt-lookup", or null without one

Then a `step` for each step of the engine:

    {"type": "step",
     "n": 1234,                       steps so far
     "time": 17.25,                   seconds of the server's own clock
     "seconds": 0.0123,               what the step took
     "predicted_seconds": 0.0119,     what the planner foretold, or null
     "running": 3, "waiting": 0,      answers in the batch; answers that wait for a place
     "pages": [210, 31, 256],         of keys and values: free, kept for known words, all
     "prompt_tokens": 0,              tokens of prompts that ran in it
     "verify_tokens": 11,             anchors and drafts that ran in it
     "budget": 8,                     drafted tokens verified, all requests together
     "why": "drafted",                plain, drafted, probe, explored, baseline; null: none decoded
     "theta": [88.1, 95.0, ..],       predicted tokens/s by budget 0, 1, 2, .., or null
     "plain_theta": 80.3,             the same without drafting, or null
     "dropped": 0,                    steps that this listener missed before this one
     "rounds": [
       {"id": "chatcmpl-..-0",        the answer: the id of its response, then its index
        "prefill": false,             true: the prompt's own pass gave the one token, no block
        "offered": 7, "planned": 4, "accepted": 3,
        "survival": [0.93, 0.81, ..], chance that drafted tokens 1..k are all accepted, calibrated;
                                      one for each offered token, or null without confidences
        "drafted": [" the", " end", ..],   text of the offered tokens
        "tokens": [" the", " end", " of", " it"],   text of the committed tokens
        "origins": ["accepted", "accepted", "accepted", "corrected"],
                                      how each came: plain, accepted, copied, corrected, bonus
        "cached": 0,                  with "prefill": tokens of the prompt that were known already
        "finish": null}               or "stop", "length", "context"
     ]}

In a block, positions up to `accepted` are kept and committed, from there to `planned` they were
verified and rejected (the token committed after them is the corrected one), from `planned` to
`offered` they were dropped unchecked. A token's text may hold U+FFFD: half a character.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from dspark.algorithms.calibration import Calibration, SamplingClass
from dspark.core import RoundResult, SamplingParams, StepResult
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.live_calibration import LiveCalibration
from dspark.engine.load import Load
from dspark.engine.planner import Planner
from dspark.engine.prompt_lookup import PromptLookup
from dspark.llm import LLM, PROMPT_LOOKUP

_MAX_LISTENERS = 32
_MAX_UNREAD = 64
_MAX_THETA = 129
"""Budgets of the curve that are sent, at most."""


class Listener:
    """One reader of the feed; it lives on the event loop."""

    def __init__(self) -> None:
        self.unread: deque[str] = deque()
        self.num_dropped = 0
        self.is_closed = False
        self._ready = asyncio.Event()

    def put(self, text: str) -> None:
        """A step more; it is dropped if too many lie unread."""
        if len(self.unread) >= _MAX_UNREAD:
            self.num_dropped += 1
            return
        self.unread.append(text)
        self._ready.set()

    def close(self) -> None:
        """There will be no more."""
        self.is_closed = True
        self._ready.set()

    async def read(self) -> AsyncIterator[bytes]:
        """Events as bytes, until the feed closes."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            parts = []
            while self.unread:
                parts.append(f'data: {{{self.unread.popleft()},"dropped":{self.num_dropped}}}\n\n')
                self.num_dropped = 0
            if parts:
                yield "".join(parts).encode()
            if self.is_closed and not self.unread:
                return


class Feed:
    """Step records from the engine's thread to listeners on the event loop."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._listeners: set[Listener] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._calibration = llm.calibration or Calibration.identity(max(llm.block_size, 1))
        self.is_watched = False
        """Whether a record is worth making; read by the engine's thread."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the event loop of the listeners."""
        self._loop = loop

    def close(self) -> None:
        """End all listeners."""
        self._is_closed = True
        for listener in self._listeners:
            listener.close()

    def join(self) -> Listener | None:
        """A new listener, `None` if there are too many or the server stops."""
        if self._is_closed or len(self._listeners) >= _MAX_LISTENERS:
            return None
        listener = Listener()
        self._listeners.add(listener)
        self.is_watched = True
        return listener

    def leave(self, listener: Listener) -> None:
        """Forget a listener."""
        self._listeners.discard(listener)
        self.is_watched = bool(self._listeners)

    def hello(self) -> str:
        """The first event, without its braces."""
        llm, drafter = self._llm, self._llm.drafter
        kind = None
        if drafter is not None:
            kind = PROMPT_LOOKUP if isinstance(drafter, PromptLookup) else str(drafter.config.kind)
        return _fields(
            {
                "type": "hello",
                "model": llm.target.spec.name,
                "drafter": kind,
                "policy": llm.policy,
                "block_size": llm.block_size,
                "max_requests": llm.config.max_requests,
            }
        )

    def publish(self, text: str) -> None:
        """Send a record to all listeners; called in the engine's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_out, text)

    def record(
        self,
        result: StepResult,
        *,
        planner: Planner,
        step_number: int,
        now_s: float,
        seconds: float,
        load: Load,
        params_of: Callable[[str], SamplingParams],
    ) -> str:
        """A step as its JSON fields, without braces. `params_of` knows the answers in it."""
        plan = None
        if any(not item.is_prefill for item in result.rounds) and planner.records:
            plan = planner.records[-1]
        theta = plain = None
        if plan is not None and plan.rates_B is not None:
            theta = [round(float(rate), 3) for rate in plan.rates_B[:_MAX_THETA]]
        if plan is not None and plan.plain_rate is not None:
            plain = round(float(plan.plain_rate), 3)
        predicted = None if plan is None else plan.predicted_seconds
        return _fields(
            {
                "type": "step",
                "n": step_number,
                "time": round(now_s, 4),
                "seconds": round(seconds, 6),
                "predicted_seconds": None if predicted is None else round(float(predicted), 6),
                "running": load.num_decoding + load.num_reading,
                "waiting": load.num_waiting,
                "pages": [load.num_free_pages, load.num_cached_pages, load.num_pages],
                "prompt_tokens": result.num_prompt_tokens,
                "verify_tokens": result.num_verify_tokens,
                "budget": sum(item.num_planned for item in result.rounds),
                "why": None if plan is None else plan.why,
                "theta": theta,
                "plain_theta": plain,
                "rounds": [
                    self._round(item, planner, params_of(item.request_id)) for item in result.rounds
                ],
            }
        )

    def _round(self, item: RoundResult, planner: Planner, params: SamplingParams) -> dict[str, Any]:
        return {
            "id": item.request_id,
            "prefill": item.is_prefill,
            "offered": item.num_offered,
            "planned": item.num_planned,
            "accepted": item.num_accepted,
            "survival": self._survival(item, planner, params),
            "drafted": self._texts(item.offered_ids),
            "tokens": self._texts(item.token_ids),
            "origins": [str(origin) for origin in item.origins],
            "cached": item.num_cached,
            "finish": None if item.finish_reason is None else str(item.finish_reason),
        }

    def _survival(
        self, item: RoundResult, planner: Planner, params: SamplingParams
    ) -> list[float] | None:
        """As the planner in force believes it; a fixed one believes the drafter's calibration."""
        logits = item.confidence_logits
        if logits is None:
            return None
        block_size = self._llm.block_size
        if item.is_copied:
            (believed,) = LiveCalibration.believed([logits])
            return [round(value, 4) for value in believed]
        row = [*logits, *[0.0] * (block_size - len(logits))]
        sampling_class = SamplingClass.of(params)
        if isinstance(planner, AdaptivePlanner):
            index = LiveCalibration.index(sampling_class)
            (survival,) = planner.calibration.survival_few([row], [index])
        else:
            scaling = self._calibration.scaling(sampling_class)
            survival = scaling.survival(np.array([row], dtype=np.float32))[0].tolist()
        return [round(value, 4) for value in survival[: len(logits)]]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        tokenizer = self._llm.tokenizer
        return [
            tokenizer.token_bytes(token, keep_special=True).decode("utf-8", errors="replace")
            for token in ids
        ]

    def _hand_out(self, text: str) -> None:
        for listener in self._listeners:
            listener.put(text)


def _fields(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))[1:-1]
