"""Real weights of other families, when their GGUF files are at hand, against plain transformers.

`--gguf PATH` (repeatable) names them, for example Qwen2.5-Coder-0.5B-Instruct or Gemma 3 270M.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dspark.core import SamplingParams
from dspark.engine.cycle import CycleConfig
from dspark.llm import LLM
from dspark.models import gguf
from tests.toys import toy_drafter

TEXT = "def area(width, height):\n    return width * height\n\nThe quick brown fox jumps over the"


def test_logits_and_speculation_on_real_weights(gguf_path: Path) -> None:
    folder = gguf.converted(gguf_path)
    config = CycleConfig(num_positions=2048, is_checked=True)
    llm = LLM.load(folder, drafter=None, dtype="fp32", device="cpu", compile=False, config=config)
    ids = torch.tensor(llm.tokenizer.encode(TEXT))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(ids[None]).logits[0]
    found = llm.target.logits(llm.target.states([ids], tap_layers=()).hidden_ND)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4

    spec = llm.target.spec
    llm.drafter = toy_drafter(
        llm.target,
        hidden_size=spec.hidden_size,
        target_layer_ids=(1, spec.num_layers // 2),
        mask_token_id=spec.vocab_size - 1,
        d2t_S=torch.arange(512),
    )
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [ids.tolist(), ids.tolist()[:9]]
    fast = llm.generate(prompts, params)
    slow = llm.generate(prompts, params, speculation=False)
    assert [c.token_ids for c in fast] == [c.token_ids for c in slow]
    assert sum(c.stats.acceptance.num_offered for c in fast) > 0
