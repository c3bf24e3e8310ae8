"""The public face: prompts in any form, streams, stop strings, statistics, refusals."""

import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark import assembly
from dspark.completion import Job, Prompt
from dspark.core import FinishReason, Origin, SamplingParams, resolve_dtype
from dspark.engine.cycle import CycleConfig
from dspark.errors import InputError, ModelError
from dspark.kernels import extension
from dspark.llm import LLM
from dspark.models.checkpoint import Provenance, save_drafter, target_fingerprint
from tests.toys import toy_drafter

PROMPTS: list[Prompt] = ["Once upon a time", [5, 6, 7, 8], [{"role": "user", "content": "Hello"}]]
CONFIG = CycleConfig(num_positions=2048, page_size=8, is_checked=True)


@pytest.fixture(scope="module")
def llm(toy_llm: LLM) -> LLM:
    return toy_llm.with_config(CONFIG)


def greedy(max_tokens: int = 24, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def test_speculation_changes_no_answer(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, greedy(), speculation=False)
    fast = llm.generate(PROMPTS, greedy())
    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]
    assert [c.text for c in fast] == [c.text for c in plain]
    assert all(c.stats.acceptance.num_offered > 0 for c in fast)
    assert all(c.stats.acceptance.num_offered == 0 for c in plain)
    assert all(set(c.origins) == {Origin.PLAIN} for c in plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_int8_keys_and_values_speculation_changes_no_answer(
    model_dir: Path, drafter_dir: Path, temperature: float
) -> None:
    """In any batch, and read in chunks or at once: what is kept is rounded as it is written."""
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "compile": False}
    config = CycleConfig(num_positions=2048, page_size=16, is_checked=True)
    narrow = CycleConfig(num_positions=2048, page_size=16, max_requests=1, max_step_tokens=7)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    llm = LLM.load(
        model_dir,
        drafter=drafter_dir,
        quantization="int8",
        policy="fixed",
        config=config,
        **options,
    )
    assert llm.target.has_int8_cache
    plain = llm.generate(PROMPTS, params, speculation=False)
    fast = llm.generate(PROMPTS, params)
    alone = [llm.with_config(narrow).generate([prompt], params)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]
    assert [c.token_ids for c in alone] == [c.token_ids for c in plain]


def test_int8_weights_bring_int8_keys_and_values_where_pages_can_hold_them(model_dir: Path) -> None:
    def kept(**options: Any) -> str:
        llm = LLM.load(model_dir, drafter=None, device="cpu", compile=False, **options)
        return str(llm.target.kv_dtype).removeprefix("torch.")

    assert kept(dtype="bf16", quantization="int8") == "int8"
    assert kept(dtype="bf16", quantization="int8", kv_cache_dtype="bf16") == "bfloat16"
    assert kept(dtype="bf16") == "bfloat16"
    assert kept(dtype="bf16", kv_cache_dtype="int8") == "int8"
    small = CycleConfig(page_size=8)
    assert kept(dtype="fp32", quantization="int8", config=small) == "float32"
    llm = LLM.load(
        model_dir, drafter=None, device="cpu", compile=False, kv_cache_dtype="int8", config=small
    )
    with pytest.raises(InputError, match=r"page_size is 8, but with int8 .* multiple of 16"):
        llm.generate(PROMPTS, greedy())


def test_a_stream_joined_is_the_completion(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPTS[0]], greedy())
    pieces = list(llm.stream(PROMPTS[0], greedy()))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [t for piece in pieces for t in piece.token_ids] == completion.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_cuts_text_and_tokens_in_both_modes(llm: LLM) -> None:
    """UC-024: the stop may start and end anywhere in a block."""
    (whole,) = llm.generate([PROMPTS[0]], greedy(40))
    text = whole.text
    stop = text[10:13]
    assert stop.strip("�")
    cut = text.find(stop)
    for speculation in (False, True):
        (found,) = llm.generate([PROMPTS[0]], greedy(40, stop=[stop]), speculation=speculation)
        assert found.text == text[:cut]
        assert found.finish_reason is FinishReason.STOP
        assert list(found.token_ids) == list(whole.token_ids[: len(found.token_ids)])


def test_closing_a_stream_early_frees_the_request(llm: LLM) -> None:
    """UC-059."""
    stream = llm.stream(PROMPTS[0], greedy(200))
    next(stream)
    stream.close()
    assert not llm.cycle(speculation=True).has_work
    (after,) = llm.generate([PROMPTS[0]], greedy(8))
    assert len(after.token_ids) == 8


def test_zero_tokens_run_no_model(llm: LLM) -> None:
    """UC-025."""
    (completion,) = llm.generate([PROMPTS[0]], greedy(0))
    assert completion.token_ids == []
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.LENGTH
    assert [p.finish_reason for p in llm.stream(PROMPTS[0], greedy(0))] == [FinishReason.LENGTH]


def test_counts_of_an_answer_agree_with_its_tokens(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPTS[0]], greedy(30))
    stats = completion.stats.acceptance
    assert len(completion.origins) == len(completion.token_ids) == 30
    assert stats.num_committed == 29  # the first token comes from the prompt's own pass
    assert completion.origins.count(Origin.ACCEPTED) == stats.num_accepted
    assert stats.num_rounds <= 29
    assert completion.stats.tau == pytest.approx(29 / stats.num_rounds)


def test_a_refused_prompt_leaves_the_others_unsubmitted(llm: LLM) -> None:
    with pytest.raises(InputError, match="empty prompt"):
        llm.generate([PROMPTS[0], []], greedy())
    assert not llm.cycle(speculation=True).has_work


def test_the_wrong_number_of_parameters_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="3 prompts came with 1 sets"):
        llm.generate(PROMPTS, [greedy()])


def test_answers_after_another_engine_used_the_target_are_the_same(llm: LLM) -> None:
    """Plain and speculating engines take turns on one target, each with its own pages."""
    first = llm.generate(PROMPTS, greedy())
    llm.generate(PROMPTS, greedy(), speculation=False)
    assert [c.token_ids for c in llm.generate(PROMPTS, greedy())] == [c.token_ids for c in first]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantization": "int3"}, "quantization is 'int3', but it must be int8; leave it out"),
        ({"policy": "bold"}, "policy is 'bold'"),
        ({"drafter": "no/such/place"}, "no/such/place/config.json does not exist"),
    ],
)
def test_a_mistake_is_told_before_the_target_is_loaded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], sentence: str
) -> None:
    monkeypatch.setattr("dspark.llm.Target", None)
    with pytest.raises((InputError, ModelError), match=sentence):
        LLM.load(model_dir, **options)


def test_a_missing_drafter_is_one_clear_sentence(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM.load(model_dir, drafter="/nowhere", dtype="fp32", device="cpu", compile=False)


@pytest.mark.parametrize("has_operators", [False, True])
def test_without_instructions_for_bf16_the_operators_alone_take_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, has_operators: bool
) -> None:
    """What serves is read at half the bytes; what trains multiplies by PyTorch."""
    if has_operators and not extension.IS_LOADED:
        pytest.skip("the C++ operators are not built")
    monkeypatch.setattr("dspark.core._has_bf16", lambda: False)
    monkeypatch.setattr(extension, "IS_LOADED", has_operators)
    served = torch.bfloat16 if has_operators else torch.float32
    assert LLM.load(model_dir, drafter=None, device="cpu", compile=False).target.dtype == served
    monkeypatch.setattr(assembly, "set_threads", lambda _: None)
    monkeypatch.setattr(assembly, "resolve_device", lambda _: torch.device("cpu"))
    found = {
        is_packed: assembly.load_target(
            target=str(model_dir), is_compiled=False, is_packed=is_packed
        ).dtype
        for is_packed in (True, False, None)
    }
    assert found == {True: served, False: torch.float32, None: torch.float32}


@pytest.mark.parametrize("has_bf16", [False, True])
def test_bf16_that_is_emulated_is_not_fast(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """AVX-512 without bf16: oneDNN supports the type, at a quarter of float32's speed."""
    found = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": has_bf16}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert resolve_dtype("auto") == (torch.bfloat16 if has_bf16 else torch.float32)


def test_pytorch_without_onednn_takes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where asking for an operator that is not there ended every command."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "arm64"})
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert resolve_dtype("auto") == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"device": "mps"}, "device is 'mps', but it must be cpu, cuda or auto"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but this machine shows"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', but it must be auto, bf16 or int8"),
        ({"kv_cache_dtype": "bf16", "dtype": "fp32"}, "but the arithmetic is fp32"),
    ],
)
def test_unknown_options_are_refused(
    model_dir: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        LLM.load(model_dir, drafter=None, **options)  # type: ignore[arg-type]


def test_a_line_of_jobs_is_answered_like_a_batch_and_as_each_ends(llm: LLM) -> None:
    """More jobs than slots, some of which follow from an answer; each comes out once."""
    small = LLM(
        llm.target,
        tokenizer=llm.tokenizer,
        drafter=llm.drafter,
        config=CycleConfig(max_requests=2, num_positions=512, page_size=8, is_checked=True),
    )
    jobs = [
        Job(key=str(n), prompt=[5 + n, 6, 7], params=greedy(max_tokens=3 + 5 * (n % 3)))
        for n in range(7)
    ]
    line = list(jobs)
    found = {}
    for job, completion in small.drain(lambda: line.pop(0) if line else None):
        assert job.key not in found
        found[job.key] = completion.token_ids
        if job.key == "0":
            after = [*completion.prompt_ids, *completion.token_ids]
            line.append(Job(key="0b", prompt=after, params=greedy(max_tokens=4)))
    assert set(found) == {*map(str, range(7)), "0b"}
    assert next(iter(found)) == "0"  # a short answer does not wait for a long one
    for job in jobs:
        assert found[job.key] == llm.generate([job.prompt], job.params)[0].token_ids
    assert not small.cycle(speculation=True).has_work


def test_leaving_a_line_of_jobs_early_ends_what_runs(llm: LLM) -> None:
    jobs = [Job(key=str(n), prompt=[5, 6], params=greedy(max_tokens=2 + 9 * n)) for n in range(3)]
    answers = llm.drain(lambda: jobs.pop(0) if jobs else None)
    assert next(answers)[0].key == "0"
    answers.close()
    assert not llm.cycle(speculation=True).has_work


def test_a_completion_tells_its_rounds(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPTS[0]], greedy())
    assert completion.rounds[0].is_prefill
    tokens = [token for item in completion.rounds for token in item.token_ids]
    assert tokens == list(completion.token_ids)
    assert completion.rounds[1].confidence_logits is not None


@pytest.mark.parametrize(("dtype", "is_int8"), [("bf16", True), ("fp32", False)])
def test_beside_bf16_a_drafter_is_int8(
    model_dir: Path, drafter_dir: Path, dtype: str, is_int8: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the toy drafter was made in one of the two
        llm = LLM.load(model_dir, drafter=drafter_dir, dtype=dtype, device="cpu", compile=False)
    drafter: Any = llm.drafter
    assert (drafter.packed_head.scales_O is not None) == is_int8
    assert (drafter.layers[0].mlp.down_proj.scales_O is not None) == is_int8


def test_a_drafter_of_another_thinking_mode_is_told(
    llm: LLM, model_dir: Path, tmp_path: Path
) -> None:
    """UC-102: it costs acceptance, so a sentence; the answers stay the same."""
    provenance = Provenance(
        target_name=llm.target.spec.name,
        target_fingerprint=target_fingerprint(llm.target.embed_weight_VD),
        target_dtype="float32",
        template_hash=llm.tokenizer.template_hash,
        thinking=True,
    )
    other_drafter = toy_drafter(llm.target, mask_token_id=303, max_position_embeddings=1024)
    save_drafter(other_drafter, tmp_path / "d", provenance=provenance)
    with pytest.warns(UserWarning, match="thinking mode True, and now it is None"):
        other = llm.with_drafter(tmp_path / "d")
    (found,) = other.generate([PROMPTS[0]], greedy(8))
    assert found.token_ids == llm.generate([PROMPTS[0]], greedy(8))[0].token_ids


def test_a_width_beyond_a_block_is_told(llm: LLM) -> None:
    """UC-090: clamped, and not in silence."""
    wide = llm.with_policy("fixed:9")
    with pytest.warns(UserWarning, match="fixed:9, but the drafter drafts 4 tokens a block"):
        (found,) = wide.generate([PROMPTS[0]], greedy())
    assert max(item.num_planned for item in found.rounds) == 4


def test_another_drafter_shares_the_target(llm: LLM, drafter_dir: Path) -> None:
    other, plain = llm.with_drafter(drafter_dir), llm.with_drafter(None)
    assert other.target is plain.target is llm.target
    assert plain.drafter is None
    answers = [one.generate(PROMPTS, greedy()) for one in (llm, other, plain)]
    tokens = [[c.token_ids for c in each] for each in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    assert [c.stats.acceptance for c in answers[0]] == [c.stats.acceptance for c in answers[1]]


@pytest.mark.parametrize("speculation", [False, True])
def test_the_time_of_prompt_and_answer_is_all_the_time_there_is(
    llm: LLM, speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-150: nothing is booked twice or to the other phase, drafted or not."""
    ticks = count(100.0)
    monkeypatch.setattr("dspark.llm.time.perf_counter", lambda: next(ticks))
    first = next(ticks)
    (answer,) = llm.generate([PROMPTS[0]], greedy(16), speculation=speculation)
    last = next(ticks)
    stats = answer.stats
    # one tick to submit, then one a step: the first step is the prompt's
    assert stats.prefill_s == 1.0
    assert stats.decode_s == len(answer.rounds) - 1
    assert stats.prefill_s + stats.decode_s == last - first - 2
