"""What the server has done, in Prometheus' text format.

The engine's thread counts in plain numbers (`Meter`); they become metrics when somebody asks
(`Metrics`). It knows no request's text.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dspark.core import RoundResult, StepResult
from dspark.engine.load import Load
from dspark.engine.planner import Planner, PlanRecord
from dspark.serving.answer import Answer
from dspark.serving.histogram import Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
_RATES = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 400.0)
_BUDGETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_PLANS_READ_EVERY = 64
"""Steps after which the planner's records are taken in; it remembers more than that."""


class Meter:
    """Counts of the engine's thread, read by others as they are."""

    def __init__(self, *, block_size: int) -> None:
        self.offered_at = [0] * block_size
        """Rounds whose block had a token at position k = 1.., index k - 1."""
        self.planned_at = [0] * block_size
        self.accepted_at = [0] * block_size
        self.num_steps = 0
        self.num_rounds = 0
        self.num_committed = 0
        """Tokens of rounds; the first token of an answer is none of them."""
        self.num_generated = 0
        self.num_prompt_tokens = 0
        self.num_verify_tokens = 0
        self.num_cancelled = 0
        self.num_failed_steps = 0
        self.finished_by: dict[str, int] = {}
        self.steps_by: dict[str, int] = {}
        """Steps that decoded, by the planner's reason."""
        self.step_s = Histogram(_TOKEN_SECONDS)
        self.ttft_s = Histogram(_LATENCIES)
        self.token_s = Histogram(_TOKEN_SECONDS)
        self.per_user_rate = Histogram(_RATES)
        self.budget = Histogram(_BUDGETS)
        self.predicted_s = 0.0
        self.predicted_real_s = 0.0
        """Real seconds of the steps whose seconds were predicted."""
        self.absolute_error_s = 0.0
        self.num_predicted = 0
        self.predicted_accepted = 0.0
        self.real_accepted = 0
        self._last_plan: PlanRecord | None = None

    def step(self, result: StepResult, seconds: float, planner: Planner) -> None:
        """Take in a step."""
        self.num_steps += 1
        self.num_prompt_tokens += result.num_prompt_tokens
        self.num_verify_tokens += result.num_verify_tokens
        self.step_s.add(seconds)
        budget, num_rounds = 0, 0
        for item in result.rounds:
            self.num_generated += len(item.token_ids)
            if item.is_prefill:
                continue
            num_rounds += 1
            budget += item.num_planned
            self.num_committed += len(item.token_ids)
            if item.num_offered:
                _count(self.offered_at, item.num_offered)
                _count(self.planned_at, item.num_planned)
                _count(self.accepted_at, item.num_accepted)
        if num_rounds:
            self.num_rounds += num_rounds
            self.budget.add(budget)
        if self.num_steps % _PLANS_READ_EVERY == 0:
            self.read_plans(planner)

    def read_plans(self, planner: Planner) -> None:
        """Take in the plans since the last call; in the engine's thread, as the planner works."""
        records = planner.records
        for record in reversed(records):
            if record is self._last_plan:
                break
            self._plan(record)
        if records:
            self._last_plan = records[-1]

    def _plan(self, record: PlanRecord) -> None:
        self.steps_by[record.why] = self.steps_by.get(record.why, 0) + 1
        if record.predicted_seconds is None or record.seconds is None:
            return
        self.num_predicted += 1
        self.predicted_s += record.predicted_seconds
        self.predicted_real_s += record.seconds
        self.absolute_error_s += abs(record.predicted_seconds - record.seconds)
        if record.predicted_tokens is not None and record.num_drafting:
            self.predicted_accepted += record.predicted_tokens - record.num_requests
            self.real_accepted += sum(record.accepted)

    def piece(self, answer: Answer, item: RoundResult, now_s: float) -> None:
        """Take in tokens of an answer, before the answer itself does."""
        num = len(item.token_ids)
        if answer.first_s is None:
            self.ttft_s.add(now_s - answer.order.arrived_s)
        else:
            self.token_s.add((now_s - answer.last_s) / num, num)

    def finished(self, answer: Answer, reason: str) -> None:
        """Take in the end of an answer."""
        self.finished_by[reason] = self.finished_by.get(reason, 0) + 1
        rest = answer.counts.num_tokens - 1
        if answer.first_s is not None and rest > 0 and answer.last_s > answer.first_s:
            self.per_user_rate.add(rest / (answer.last_s - answer.first_s))


def _count(at: list[int], num: int) -> None:
    for k in range(num):
        at[k] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What is true now, read when somebody asks."""

    num_open: int
    """Answers that run or wait."""
    load: Load
    policy: str


class Metrics(Collector):
    """The page at /metrics."""

    def __init__(self, meter: Meter, gauges: Callable[[], Gauges]) -> None:
        self._meter = meter
        self._gauges = gauges
        self.responses: dict[tuple[str, str], int] = {}
        """HTTP responses by path and status."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory and processor time, where Linux tells

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def count_response(self, path: str, status: int) -> None:
        """One more answer over HTTP."""
        key = (path, str(status))
        self.responses[key] = self.responses.get(key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield from self._positions()
        yield from self._totals()
        yield from self._predictions()
        yield from self._histograms()
        yield from self._now()

    def _positions(self) -> Iterator[Metric]:
        meter = self._meter
        for name, help_text, at in (
            ("offered", "Drafted tokens by position in the block.", meter.offered_at),
            ("planned", "Drafted tokens that were verified, by position.", meter.planned_at),
            ("accepted", "Drafted tokens that were committed, by position.", meter.accepted_at),
        ):
            family = CounterMetricFamily(f"dspark_{name}_tokens", help_text, labels=["position"])
            for k, value in enumerate(at, start=1):
                family.add_metric([str(k)], value)
            yield family

    def _totals(self) -> Iterator[Metric]:
        meter = self._meter
        yield _counter("steps", "Steps of the engine.", meter.num_steps)
        yield _counter("failed_steps", "Steps that broke off.", meter.num_failed_steps)
        yield _counter("rounds", "Rounds: one request in one step.", meter.num_rounds)
        yield _counter("generated_tokens", "Tokens of answers.", meter.num_generated)
        yield _counter(
            "committed_tokens",
            "Tokens that rounds committed; tau is this by rounds.",
            meter.num_committed,
        )
        yield _counter("prompt_tokens", "Tokens of prompts that were run.", meter.num_prompt_tokens)
        yield _counter(
            "verify_tokens",
            "Anchors and drafts that went through the target.",
            meter.num_verify_tokens,
        )
        yield _counter("cancelled_requests", "Requests given up.", meter.num_cancelled)
        yield _labelled(
            "finished_answers", "Answers by how they ended.", "reason", meter.finished_by
        )
        yield _labelled(
            "planned_steps", "Steps that decoded, by the planner's reason.", "why", meter.steps_by
        )
        responses = CounterMetricFamily(
            "dspark_http_responses", "Responses by path and status.", labels=["path", "status"]
        )
        for (path, status), value in list(self.responses.items()):
            responses.add_metric([path, status], value)
        yield responses

    def _predictions(self) -> Iterator[Metric]:
        meter = self._meter
        yield _counter(
            "predicted_steps", "Steps whose seconds were predicted.", meter.num_predicted
        )
        yield _counter("predicted_step_seconds", "What was predicted for them.", meter.predicted_s)
        yield _counter("real_step_seconds", "What they took.", meter.predicted_real_s)
        yield _counter(
            "step_seconds_absolute_error",
            "Differences of both, signs dropped.",
            meter.absolute_error_s,
        )
        yield _counter(
            "predicted_accepted_tokens",
            "Drafted tokens that confidences said would be committed; the calibration error is "
            "its difference from dspark_predicted_steps_accepted_tokens.",
            meter.predicted_accepted,
        )
        yield _counter(
            "predicted_steps_accepted_tokens",
            "Drafted tokens that the same steps committed.",
            meter.real_accepted,
        )

    def _histograms(self) -> Iterator[Metric]:
        meter = self._meter
        for name, help_text, histogram in (
            ("step_seconds", "Seconds of a step.", meter.step_s),
            ("time_to_first_token_seconds", "From a request to its first token.", meter.ttft_s),
            (
                "inter_token_seconds",
                "Seconds since the step before, shared out over the tokens of a step.",
                meter.token_s,
            ),
            (
                "per_user_tokens_per_second",
                "Speed of an answer after its first token.",
                meter.per_user_rate,
            ),
            ("budget_tokens", "Drafted tokens verified in a step.", meter.budget),
        ):
            yield HistogramMetricFamily(
                f"dspark_{name}",
                help_text,
                buckets=histogram.buckets(),
                sum_value=histogram.total,
            )

    def _now(self) -> Iterator[Metric]:
        gauges = self._gauges()
        load = gauges.load
        yield _counter(
            "cached_prompt_tokens",
            "Tokens of prompts that were not read again.",
            load.total_cached_tokens,
        )
        yield _counter(
            "started_prompt_tokens",
            "Tokens of prompts of all requests that started.",
            load.total_prompt_tokens,
        )
        yield _counter(
            "preemptions", "Requests that gave their pages to an older one.", load.total_sent_back
        )
        yield _counter(
            "broken_drafts",
            "Blocks that could not be drawn; nothing is drafted after the first one.",
            load.total_broken_drafts,
        )
        for name, help_text, value in (
            ("open_answers", "Answers that run or wait.", gauges.num_open),
            ("reading_requests", "Requests whose prompt is read.", load.num_reading),
            ("decoding_requests", "Requests that decode.", load.num_decoding),
            ("waiting_requests", "Requests that wait for a place.", load.num_waiting),
            ("free_pages", "Pages of keys and values with nothing in them.", load.num_free_pages),
            ("cached_pages", "Pages kept for known words.", load.num_cached_pages),
            ("pages", "Pages of keys and values.", load.num_pages),
        ):
            yield GaugeMetricFamily(f"dspark_{name}", help_text, value=value)
        policy = GaugeMetricFamily("dspark_policy_info", "The policy in force.", labels=["policy"])
        policy.add_metric([gauges.policy], 1)
        yield policy


def _counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"dspark_{name}", help_text, value=value)


def _labelled(
    name: str, help_text: str, label: str, values: Mapping[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"dspark_{name}", help_text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family
