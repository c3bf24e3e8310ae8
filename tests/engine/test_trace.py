"""One prompt through target and drafter, kept tensor by tensor: what differs first is named.

Weights of the same file draft worse in another engine when one of these tensors is another one
(UC-156); acceptance alone does not say which. `python -m tests.engine.test_trace` writes the file
anew, after a change that means to alter numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core import Request, SamplingParams
from dspark.engine.draft_pass import DraftPass
from dspark.engine.live_request import round_table
from tests.engine.toy_cycles import make_cycle
from tests.toys import toy_drafter, toy_target

GOLDEN = Path(__file__).parents[1] / "golden" / "toy_trace.json"
PROMPT = [1, 5, 7, 9, 33]


def trace(**changes: Any) -> Mapping[str, list[float]]:
    """From the prompt to the drafts: each tensor is made of those before it."""
    target = toy_target()
    drafter = toy_drafter(target, **changes)
    cycle = make_cycle(target, drafter)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=PROMPT, params=params))
    cycle.step()
    (live,) = cycle._live
    proposer = cycle._proposer
    assert isinstance(proposer, DraftPass)
    taps = target.states([torch.tensor(PROMPT)], tap_layers=drafter.config.target_layer_ids).taps_NM
    rounds = round_table([live], device=target.device)
    with torch.inference_mode():
        hidden_KD = proposer._backbone([live], cycle._cache, rounds)
        block = proposer.propose([live], cache=cycle._cache, rounds=rounds)
        found = {
            "ids": torch.tensor(live.tokens),
            "taps": taps,
            "context": drafter.context(taps),
            "hidden": hidden_KD,
            "logits": drafter.base_logits(hidden_KD),
            "drafts": block.tokens_RK,
            "confidence": block.confidence_RK,
        }
    return {
        name: [round(value, 5) for value in tensor.float().flatten().tolist()]
        for name, tensor in found.items()
        if tensor is not None
    }


def first_difference(
    found: Mapping[str, list[float]], expected: Mapping[str, list[float]]
) -> str | None:
    """The first tensor that is another one; the tolerance is for processors that add in another
    order."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        if found[name] != pytest.approx(values, abs=2e-3, rel=1e-3):
            return name
    return None


def golden() -> Mapping[str, list[float]]:
    return dict(json.loads(GOLDEN.read_text()))


def test_every_tensor_of_the_trace_is_the_one_that_was_kept() -> None:
    assert first_difference(trace(), golden()) is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target_layer_ids": (-1, 1)}, "taps"),  # the layer before
        ({"seed": 2}, "context"),  # other weights
        ({"rope_theta": 100.0}, "hidden"),
        ({"mask_token_id": 46}, "hidden"),
        ({"layer_windows": (3,)}, "hidden"),
        ({"markov_head_type": "gated"}, "confidence"),
    ],
    ids=str,
)
def test_a_wiring_that_differs_is_named_by_its_first_tensor(
    changes: dict[str, Any], name: str
) -> None:
    """UC-156: the trace can tell them apart, so that it can fail."""
    assert first_difference(trace(**changes), golden()) == name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(trace()) + "\n")
