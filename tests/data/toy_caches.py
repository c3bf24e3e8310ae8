"""The format of caches of the toy target, and random states that fit it."""

from dataclasses import replace
from typing import Any

import torch

from dspark.data.hidden_states import States
from dspark.data.states_cache import CacheFormat
from tests.toys import VOCAB_SIZE


def toy_format(**changes: Any) -> CacheFormat:
    format = CacheFormat(
        target="toy",
        target_dtype="float32",
        template="",
        tokenizer="toy",
        tap_layers=(0, 1),
        tap_size=64,
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
    )
    return replace(format, **changes)


def random_states(length: int, seed: int) -> States:
    generator = torch.Generator().manual_seed(seed)
    return States(
        taps_NM=torch.randn(length, 64, generator=generator).bfloat16(),
        last_ND=torch.randn(length, 32, generator=generator).bfloat16(),
        lse_N=torch.randn(length, generator=generator),
    )


def equal(one: States, other: States) -> bool:
    assert one.lse_N is not None
    assert other.lse_N is not None
    return (
        torch.equal(one.taps_NM, other.taps_NM)
        and torch.equal(one.last_ND, other.last_ND)
        and torch.equal(one.lse_N, other.lse_N)
    )
