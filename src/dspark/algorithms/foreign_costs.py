"""Step costs in the formats of other engines, so that their machines can be simulated here.
It reads parsed JSON; it knows no file.

    vLLM     {"draft_curve": [[requests, ms], ..], "verify_curve": [[tokens, ms], ..],
              "cudagraph_limit": n}: sizes up to the limit run as the next captured one
    SGLang   {"sample_batch_tokens": [..], "sample_steps_per_sec": [..], "max_batch_tokens": n}:
              a size costs what the probe at or below it costs
    SGLang   {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}:
              T = bias + alpha(requests) + theta(tokens), lines between the probes

SGLang's tables hold the drafter's time inside the step; with them, not drafting costs as much as
drafting and verifying nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import StepCost, VerifyRow
from dspark.errors import ModelError


def read_cost(data: Mapping[str, Any], *, block_size: int) -> StepCost:
    """Our own format or one of the above, told apart by its keys; raises `ModelError`."""
    try:
        if "fingerprint" in data:
            return StepCost.from_json(data)
        if "verify_curve" in data:
            return _of_vllm(data, block_size)
        if "bias_seconds" in data:
            return _of_sglang_sum(data, block_size)
        if "sample_steps_per_sec" in data:
            return _of_sglang_steps(data, block_size)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"The step costs cannot be read: {error}.") from error
    raise ModelError(
        f"The step costs have the keys {sorted(data)}; known are those of dspark, of vLLM "
        "(verify_curve) and of SGLang (sample_steps_per_sec, bias_seconds)."
    )


def _of_vllm(data: Mapping[str, Any], block_size: int) -> StepCost:
    padded_up_to = int(data.get("cudagraph_limit", 0))
    verify = _curve(
        [(int(n), float(ms) / 1e3) for n, ms in data["verify_curve"]], padded_up_to=padded_up_to
    )
    draft = [(int(n), float(ms) / 1e3) for n, ms in data["draft_curve"]]
    return StepCost(
        fingerprint=Fingerprint.of(source="vllm"),
        block_size=block_size,
        context=0,
        draft=_curve(draft, padded_up_to=padded_up_to),
        verify=(VerifyRow(num_requests=1, curve=verify),),
    )


def _of_sglang_steps(data: Mapping[str, Any], block_size: int) -> StepCost:
    probes = [int(n) for n in data["sample_batch_tokens"]]
    most = int(data["max_batch_tokens"])
    # a probe speaks for all sizes up to the one before the next probe
    ends = [*(n - 1 for n in probes[1:]), most]
    rates = [float(rate) for rate in data["sample_steps_per_sec"]]
    points = [(end, 1.0 / rate) for end, rate in zip(ends, rates, strict=True)]
    return StepCost(
        fingerprint=Fingerprint.of(source="sglang"),
        block_size=block_size,
        context=0,
        draft=CostCurve.free(),
        verify=(VerifyRow(num_requests=1, curve=_curve(points, padded_up_to=most)),),
    )


def _of_sglang_sum(data: Mapping[str, Any], block_size: int) -> StepCost:
    bias = float(data["bias_seconds"])
    rows = []
    for requests, alpha in zip(data["bs_probes"], data["alpha_seconds"], strict=True):
        points = [
            (int(n), bias + float(alpha) + float(theta))
            for n, theta in zip(data["m_probes"], data["theta_seconds"], strict=True)
        ]
        rows.append(VerifyRow(num_requests=int(requests), curve=_curve(points)))
    return StepCost(
        fingerprint=Fingerprint.of(source="sglang"),
        block_size=block_size,
        context=0,
        draft=CostCurve.free(),
        verify=tuple(rows),
    )


def _curve(points: Sequence[tuple[int, float]], *, padded_up_to: int = 0) -> CostCurve:
    return CostCurve(
        sizes=tuple(size for size, _ in points),
        seconds=tuple(seconds for _, seconds in points),
        errors=(0.0,) * len(points),
        padded_up_to=padded_up_to,
    )
