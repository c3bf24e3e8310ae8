"""The engines that the comparing commands time: which there are, and in which configurations.

It knows names and settings; `peer_process` knows how each engine is called, `peer_setup` where its
Python lies, `peer_weights` how its form of the weights is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.benchmarks.arithmetic import Arithmetic, arithmetics_of
from dspark.errors import InputError
from dspark.llm import shipped_drafter
from dspark.models import embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine in one configuration."""

    name: str
    """Its family, then what is special; the family's plain name comes first in the report."""
    family: str
    """dspark or one of `FAMILIES`: the adaptor in `peer_process`, and the environment."""
    config: Mapping[str, str]
    """What the report says of it."""
    weights: str
    """The form of the target that it reads, for `peer_weights.model_path`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its adaptor reads besides the model and the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The configurations of dspark that are compared: each arithmetic, plain and drafted."""

    target: str = embedded.DEFAULT_TARGET
    """Directory, hub name, GGUF file or embedded name."""
    drafter: str = "auto"
    """Directory, auto for the shipped one, none for plain decoding alone."""
    arithmetics: Sequence[str] = ("bf16", "int8")
    """Any of bf16, fp32 and int8."""
    policy: str = "auto"
    """How many drafted tokens are verified; see `algorithms.policies`."""
    compile: bool = True
    """Compile layers that do not fit the fused one: a slower start, a quicker step."""


FAMILIES = ("transformers", "llama-cpp", "openvino", "vllm")
"""What `--peers` may name; it may name one configuration as well."""

LOOKUP_TOKENS = 5
"""Tokens that prompt lookup proposes in a round, wherever a peer has it."""


# where a processor has matrix units for bf16, OpenVINO's default turns 8-bit weights into bf16 for
# every product; 8-bit products are up to 1.5 times as fast for one request
_QUANTIZED = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"}
# its bf16 products of fp16 weights divide by zero on some virtual machines with matrix units
_SINGLE_PRECISION = {"INFERENCE_PRECISION_HINT": "f32"}


def peer_engines() -> list[Engine]:
    """Every configuration of every peer: the fastest ones of each at this size of model."""
    lookup = {"prompt lookup": f"{LOOKUP_TOKENS} tokens"}
    found = [
        Engine(
            name="transformers",
            family="transformers",
            config={"dtype": "bf16"},
            weights="directory",
        ),
        Engine(
            name="transformers-lookup",
            family="transformers",
            config={"dtype": "bf16", **lookup},
            weights="directory",
            settings={"lookup": LOOKUP_TOKENS},
        ),
    ]
    found += [
        Engine(
            name=f"llama-cpp-{kind}",
            family="llama-cpp",
            config={"weights": kind},
            weights=f"gguf-{kind}",
        )
        for kind in ("q4_0", "shipped", "q8_0", "bf16")
    ]
    return [
        *found,
        _openvino("int8", "int8", _QUANTIZED),
        _openvino("int8-default", "int8", {}),
        _openvino("int4", "int4", _QUANTIZED),
        _openvino("fp16", "fp16", _SINGLE_PRECISION),
        _openvino("int8-lookup", "int8", _QUANTIZED, lookup=LOOKUP_TOKENS),
        Engine(name="vllm", family="vllm", config={"dtype": "bf16"}, weights="directory"),
        Engine(
            name="vllm-ngram",
            family="vllm",
            config={"dtype": "bf16", **lookup},
            weights="directory",
            settings={"lookup": LOOKUP_TOKENS},
        ),
    ]


def _openvino(
    name: str, kind: str, options: Mapping[str, str], *, lookup: int | None = None
) -> Engine:
    config = {"weights": kind, **({} if options else {"arithmetic": "its default"}), **options}
    return Engine(
        name=f"openvino-{name}",
        family="openvino",
        config=config if lookup is None else {**config, "prompt lookup": f"{lookup} tokens"},
        weights=f"openvino-{kind}",
        settings={"options": options, "lookup": lookup},
    )


def chosen_peers(names: Sequence[str]) -> list[Engine]:
    """The engines that `names` mean: families with all their configurations, or single ones."""
    known = peer_engines()
    found: list[Engine] = []
    for name in names:
        meant = [engine for engine in known if name in (engine.family, engine.name)]
        if name not in FAMILIES:  # a family may be called like its plain configuration
            meant = [engine for engine in known if engine.name == name]
        if not meant:
            single = ", ".join(engine.name for engine in known)
            raise InputError(
                f"peers holds {name!r}, but it may name {', '.join(FAMILIES)}, or single "
                f"configurations ({single})."
            )
        found += [engine for engine in meant if engine not in found]
    return found


def our_engines(ours: Ours) -> list[Engine]:
    """dspark in each arithmetic: drafted, if there is a drafter, and plain."""
    has_drafter = ours.drafter != "none" and (
        ours.drafter != "auto" or shipped_drafter(ours.target) is not None
    )
    names = [*(["dspark"] if has_drafter else []), "dspark-plain"]
    arithmetics = arithmetics_of(ours.arithmetics)
    return [_ours(ours, name, arithmetic) for name in names for arithmetic in arithmetics]


def _ours(ours: Ours, name: str, arithmetic: Arithmetic) -> Engine:
    drafter = "none" if name == "dspark-plain" else ours.drafter
    return Engine(
        name=f"{name}-{arithmetic.name}",
        family="dspark",
        config={
            "arithmetic": arithmetic.name,
            "drafter": drafter,
            **({} if drafter == "none" else {"policy": ours.policy}),
        },
        weights="source",
        settings={
            "drafter": None if drafter == "none" else drafter,
            "policy": ours.policy,
            "dtype": arithmetic.dtype,
            "quantization": arithmetic.quantization,
            "kv_cache_dtype": arithmetic.kv_cache_dtype,
            "compile": ours.compile,
        },
    )
