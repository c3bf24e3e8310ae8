"""One engine in a process of its own, run by the Python that has it: prompts in, greedy ids out.

Run as a script, `python -I peer_process.py '{"engine": "vllm", ...}'`. It stands alone, since the
other engines live in environments of their own where dspark is not installed: the standard library
first, the engine when it is built. One line of JSON in, one out:

    (start)                                        {"version": "0.32.0"}
    {"prompts": [[1, 2], [3]], "num_tokens": 8}    {"seconds": 0.1, "token_ids": [[...], [...]]}

It times an answer; it compares nothing. Whatever an engine prints goes to the error output.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
"""Prompts as ids, and a count, to exactly that many greedy ids for each; end-of-text tokens do not
stop it. All prompts run together."""

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of prctl(2)


def build(settings: Mapping[str, Any]) -> Generate:
    """Load the engine that `settings["engine"]` names, with the other settings, in this process."""
    builders: dict[str, Callable[[Mapping[str, Any]], Generate]] = {
        "dspark": _dspark,
        "transformers": _transformers,
        "llama-cpp": lambda found: _LlamaCpp(found).generate,
        "openvino": _openvino,
        "vllm": _vllm,
    }
    return builders[settings["engine"]](settings)


def _dspark(settings: Mapping[str, Any]) -> Generate:
    from dspark.core import SamplingParams
    from dspark.engine.cycle import CycleConfig
    from dspark.llm import LLM

    llm = LLM.load(
        settings["model"],
        drafter=settings["drafter"],
        dtype=settings["dtype"],
        quantization=settings["quantization"],
        kv_cache_dtype=settings["kv_cache_dtype"],
        compile=settings["compile"],
        policy=settings["policy"],
        config=CycleConfig(
            max_requests=settings["max_requests"],
            num_positions=settings["max_requests"] * settings["max_positions"],
            copies=True,  # as it is served
            prefix_cache=False,  # every repetition reads its prompts, as the peers do
        ),
    )

    if llm.drafter is not None:
        llm.cycle(speculation=True)  # step costs are measured before anything is timed

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Sequence[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers = llm.generate(list(prompts), params, speculation=llm.drafter is not None)
        return [answer.token_ids for answer in answers]

    return generate


def _transformers(settings: Mapping[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(settings["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()
    # the model's own settings may hold penalties and an end-of-text token
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=settings.get("lookup")
    )

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Sequence[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens)
        new_ids: list[list[int]] = output[:, width:].tolist()
        return new_ids

    return generate


class _LlamaCpp:
    """llama.cpp by the functions of its C library: the wrapper's class copies logits and knows one
    sequence."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            settings["model"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = settings["max_requests"]
        params.n_ctx = settings["max_requests"] * settings["max_positions"]
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> Sequence[Sequence[int]]:
        """Each prompt is a sequence of its own in one batch."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        ends = []
        for row, prompt in enumerate(prompts):
            for position, token_id in enumerate(prompt):
                end = self._add(token_id, position, row, has_logits=position == len(prompt) - 1)
            ends.append(end)
        answers = [[token_id] for token_id in self._decode(ends)]
        for number in range(num_tokens - 1):
            for row, prompt in enumerate(prompts):
                self._add(answers[row][-1], len(prompt) + number, row, has_logits=True)
            for answer, token_id in zip(answers, self._decode(range(len(prompts))), strict=True):
                answer.append(token_id)
        return answers

    def _add(self, token_id: int, position: int, row: int, *, has_logits: bool) -> int:
        """Put one token into the next batch; its place there."""
        batch, place = self._batch, int(self._batch.n_tokens)
        batch.token[place], batch.pos[place], batch.logits[place] = token_id, position, has_logits
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        batch.n_tokens += 1
        return place

    def _decode(self, places: Sequence[int]) -> list[int]:
        """Run the batch and empty it; the best tokens behind some of its places."""
        import numpy as np

        if self._lib.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._batch.n_tokens = 0
        shape = (self._num_vocab,)
        return [
            int(np.argmax(np.ctypeslib.as_array(logits, shape=shape)))
            for logits in (self._lib.llama_get_logits_ith(self._context, i) for i in places)
        ]


def _openvino(settings: Mapping[str, Any]) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    lookup = settings.get("lookup")
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": settings["num_threads"],
        **settings.get("options", {}),
    }

    def config(num_tokens: int) -> Any:
        found = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        if lookup is not None:
            found.num_assistant_tokens, found.max_ngram_size = lookup, 3
        return found

    def tensor(values: Sequence[int]) -> Any:
        return ov.Tensor(np.array([values], dtype=np.int64))

    if settings["max_requests"] == 1 and lookup is None:
        # for one request its older attention is a little faster than the paged one
        pipeline = genai.LLMPipeline(settings["model"], "CPU", ATTENTION_BACKEND="SDPA", **options)

        def one(prompts: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Sequence[int]]:
            # without a mask it would go on from the answer before
            inputs = [genai.TokenizedInputs(tensor(p), tensor([1] * len(p))) for p in prompts]
            return [pipeline.generate(each, config(num_tokens)).tokens[0] for each in inputs]

        return one

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the prompt is part of the time, in every round
    scheduler.max_num_seqs = settings["max_requests"]
    if lookup is not None:
        options["prompt_lookup"] = True
    batching = genai.ContinuousBatchingPipeline(
        settings["model"], scheduler, "CPU", properties=options
    )

    def together(prompts: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Sequence[int]]:
        configs = [config(num_tokens)] * len(prompts)
        results = batching.generate([tensor(prompt) for prompt in prompts], configs)
        return [result.m_generation_ids[0] for result in results]

    return together


def _vllm(settings: Mapping[str, Any]) -> Generate:
    processors = ",".join(str(number) for number in _processors()[: settings["num_threads"]])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = processors
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    speculative = None
    if settings.get("lookup") is not None:
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": settings["lookup"],
            "prompt_lookup_max": 3,
        }
    model: Any = LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_positions"],
        max_num_seqs=settings["max_requests"],
        enable_prefix_caching=False,
        speculative_config=speculative,
    )

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Sequence[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = model.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def _version(packages: Sequence[str]) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _serve(settings: Mapping[str, Any], replies: TextIO) -> None:
    def reply(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    generate = build(settings)
    reply({"version": _version(settings["packages"])})
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        answers = generate(task["prompts"], task["num_tokens"])
        seconds = time.perf_counter() - started
        ids = [[int(token_id) for token_id in answer] for answer in answers]
        reply({"seconds": seconds, "token_ids": ids})


def main() -> None:
    """Serve until the other end closes, on the first processors of this process."""
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an engine's chatter must not mix with the replies
    if sys.platform == "linux":  # a frozen process would outlive a parent that was killed
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        os.sched_setaffinity(0, _processors()[: settings["num_threads"]])
    try:
        _serve(settings, replies)
    except Exception as error:
        if type(error).__module__ != "dspark.errors":
            raise
        print(json.dumps({"error": str(error)}), file=replies, flush=True)  # a sentence for a user


if __name__ == "__main__":
    main()
