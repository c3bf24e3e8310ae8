import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.benchmarks import audit
from dspark.core import SamplingParams
from dspark.llm import LLM
from dspark.models.target import Target

PROMPT = [5, 6, 7, 8]


def test_equal_answers_have_no_divergence(llm: LLM) -> None:
    assert audit.first_difference([1, 2, 3], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)],
)
def test_the_first_difference_is_found(left: list[int], right: list[int], position: int) -> None:
    assert audit.first_difference(left, right) == position


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_token_far_from_the_best_is_not_explained(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6)
    plain = list(llm.generate([PROMPT], params, speculation=False)[0].token_ids)
    wrong = [*plain[:3], (plain[3] + 1) % 300, *plain[4:]]
    divergence = audit.compare(
        llm.target,
        prompt_ids=PROMPT,
        plain_ids=plain,
        dspark_ids=wrong,
        params=params,
        block_size=4,
    )
    assert divergence is not None
    assert divergence.position == 3
    assert divergence.tokens == [plain[3], wrong[3]]
    assert divergence.top2_gap > divergence.noise
    assert not divergence.explained


def test_an_exact_tie_is_explained() -> None:
    """Two rows of the head are equal, so the choice between their tokens is no one's mistake."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    prefix = torch.tensor([[*PROMPT, 3]])
    best = int(model(prefix).logits[0, -1].argmax())
    twin = (best + 1) % 32
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    divergence = audit.compare(
        Target.wrap(model),
        prompt_ids=PROMPT,
        plain_ids=[3, best],
        dspark_ids=[3, twin],
        params=SamplingParams(temperature=0.0),
        block_size=2,
    )
    assert divergence is not None
    assert divergence.position == 1
    assert divergence.top2_gap == 0.0
    assert divergence.explained


def test_an_answer_that_ends_early_is_not_explained(llm: LLM) -> None:
    divergence = audit.compare(
        llm.target,
        prompt_ids=PROMPT,
        plain_ids=[9, 9, 9],
        dspark_ids=[9, 9],
        params=SamplingParams(temperature=0.0),
        block_size=4,
    )
    assert divergence is not None
    assert divergence.tokens == [9, None]
    assert not divergence.explained
    assert "ends there" in divergence.sentence()


def test_the_scores_of_the_audit_choose_the_engine_s_own_tokens(llm: LLM) -> None:
    """At temperature 1 the audit must add the very noise that the engine drew with."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8)
    answer = list(llm.generate([PROMPT], params, speculation=False)[0].token_ids)
    prefix = [*PROMPT, *answer[:-1]]
    logits_TV = next(audit._answer_logits(llm.target, prefix, len(PROMPT), 4))
    scores_AV = audit._scores(logits_TV, first=len(PROMPT), params=params)
    assert scores_AV.argmax(-1).tolist() == answer
