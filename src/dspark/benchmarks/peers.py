"""The engines that `bench single` times, each behind one call: ids in, greedy ids out.

An engine is built inside its own process (`single.Worker`), so heavy imports stand in the functions
that need them: a peer is an optional dependency. It knows no clock.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspark.benchmarks.gguf_weights import weights_as
from dspark.core import SamplingParams
from dspark.errors import InputError, ModelError
from dspark.llm import LLM
from dspark.models import embedded, gguf, target

Generate = Callable[[Sequence[int], int], Sequence[int]]
"""Prompt ids and a count to exactly that many greedy ids; end-of-text tokens do not stop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine in one configuration."""

    name: str
    package: str
    """The distribution whose version is reported."""
    install: str
    """The command that installs it."""
    config: Mapping[str, str]
    fallback: Mapping[str, str] | None = None
    """Settings to add if the engine dies before its first answer; the report shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The configuration of dspark that is compared."""

    target: str = embedded.DEFAULT_TARGET
    """Directory, hub name, GGUF file or embedded name."""
    drafter: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    compile: bool = True
    """Compile the layers: a slower start, a quicker step."""


PEERS = ("transformers", "llama-cpp", "vllm")
"""What `--peers` may name."""


def engines(ours: Ours, peers: Sequence[str], *, gguf_kinds: Sequence[str]) -> list[Engine]:
    """dspark plain and speculative, then each peer; llama.cpp once for each kind of weights."""
    config = {
        "target": ours.target,
        "dtype": ours.dtype,
        "quantization": ours.quantization or "none",
        "compile": str(ours.compile).lower(),
    }
    found = [
        Engine(
            name="dspark",
            package="dspark",
            install="make setup",
            config={**config, "drafter": ours.drafter},
        ),
        Engine(
            name="dspark-plain",
            package="dspark",
            install="make setup",
            config={**config, "drafter": "none"},
        ),
    ]
    for peer in peers:
        match peer:
            case "transformers":
                found.append(_peer(peer, "transformers", ours, {"dtype": "bf16"}))
            case "vllm":
                found.append(_peer(peer, "vllm", ours, {"dtype": "bf16"}))
            case "llama-cpp":
                for kind in gguf_kinds:
                    name = "llama-cpp" if kind == "bf16" else f"llama-cpp-{kind}"
                    engine = _peer(name, "llama-cpp-python", ours, {"weights": kind})
                    # its products of 8 and 4 bits for AMX crash on some virtual machines
                    found.append(replace(engine, fallback={"repacking": "off"}))
            case _:
                raise InputError(f"peers holds {peer!r}, but it may name {', '.join(PEERS)}.")
    return found


def _peer(name: str, package: str, ours: Ours, config: Mapping[str, str]) -> Engine:
    return Engine(
        name=name,
        package=package,
        install=f"pip install {package}",
        config={"target": ours.target, **config},
    )


def build(engine: Engine, *, num_threads: int) -> Generate:
    """Load the engine in this process with so many threads."""
    match engine.package:
        case "dspark":
            return _dspark(engine.config)
        case "transformers":
            return _transformers(engine.config)
        case "llama-cpp-python":
            return _llama_cpp(engine.config, num_threads=num_threads)
        case "vllm":
            return _vllm(engine.config, num_threads=num_threads)
        case _:
            raise AssertionError(engine.package)


def _dspark(config: Mapping[str, str]) -> Generate:
    drafter = None if config["drafter"] == "none" else config["drafter"]
    quantization = None if config["quantization"] == "none" else config["quantization"]
    llm = LLM.load(
        config["target"],
        drafter=drafter,
        dtype=config["dtype"],
        quantization=quantization,
        compile=config["compile"] == "true",
    )

    if drafter is not None and llm.drafter is None:
        raise ModelError(
            f"no drafter is shipped for target {config['target']!r}; give one with --drafter."
        )

    def generate(prompt_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate([prompt_ids], params, speculation=drafter is not None)[0].token_ids

    return generate


def _transformers(config: Mapping[str, str]) -> Generate:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = target.resolve_source(config["target"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # the model's own settings may hold penalties and an end-of-text token
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def generate(prompt_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        ids = torch.tensor([list(prompt_ids)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
        new_ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return new_ids

    return generate


def _llama_cpp(config: Mapping[str, str], *, num_threads: int) -> Generate:
    import llama_cpp

    path = _gguf_file(config["target"], config["weights"])
    if config.get("repacking") == "off":
        _switch_repacking_off(llama_cpp)
    model = llama_cpp.Llama(
        str(path),
        n_ctx=2048,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        verbose=False,
    )

    def generate(prompt_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        model.reset()
        stream = model.generate(list(prompt_ids), temp=0.0, reset=False)
        return [int(next(stream)) for _ in range(num_tokens)]

    return generate


def _switch_repacking_off(library: Any) -> None:
    # the binding has no argument for it; this process runs nothing else
    defaults = library.llama_cpp.llama_model_default_params

    def without_extra_buffers() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    library.llama_cpp.llama_model_default_params = without_extra_buffers


def _gguf_file(source: str, weights: str) -> Path:
    path = embedded.embedded_gguf(source) if embedded.is_embedded(source) else Path(source)
    if path.suffix != ".gguf":
        raise ModelError(
            f"llama.cpp reads GGUF files and the target is {source}; give a .gguf file as target."
        )
    if weights == "shipped":
        return path
    return weights_as(path, weights, cache=gguf.default_cache() / "peers")


def _vllm(config: Mapping[str, str], *, num_threads: int) -> Generate:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM as VLLM
    from vllm import SamplingParams as VLLMParams

    folder = target.resolve_source(config["target"])
    model: Any = VLLM(model=folder, dtype="bfloat16", max_model_len=2048)

    def generate(prompt_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        params = VLLMParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = model.generate({"prompt_token_ids": list(prompt_ids)}, params, use_tqdm=False)
        new_ids: list[int] = list(outputs[0].outputs[0].token_ids)
        return new_ids

    return generate
