"""The same code on a CUDA device: same greedy and seeded text as plain decoding there."""

from pathlib import Path

import pytest
import torch

from dspark.core import SamplingParams
from dspark.engine.cycle import CycleConfig
from dspark.llm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("seed", [None, 7])
def test_speculation_changes_no_answer_on_cuda(
    model_dir: Path, drafter_dir: Path, seed: int | None
) -> None:
    config = CycleConfig(num_positions=2048, page_size=8, is_checked=True)
    llm = LLM.load(
        model_dir, drafter=drafter_dir, dtype="fp32", device="cuda", compile=False, config=config
    )
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=24, ignore_eos=True
    )
    prompts = ["Once upon a time", [5, 6, 7, 8]]
    fast = llm.generate(prompts, params)
    slow = llm.generate(prompts, params, speculation=False)
    assert [c.token_ids for c in fast] == [c.token_ids for c in slow]
    assert all(c.stats.acceptance.num_offered > 0 for c in fast)
