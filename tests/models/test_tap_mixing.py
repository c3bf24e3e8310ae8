from pathlib import Path

import pytest
import torch

from dspark.core import SamplingParams
from dspark.llm import LLM
from dspark.models.checkpoint import Provenance, load_drafter, save_drafter
from dspark.models.tap_mixing import TapMixing
from tests.toys import toy_drafter, toy_target


def test_each_layer_reads_its_own_mix():
    mixing = TapMixing(num_layers=2, num_taps=3, hidden_size=4, eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixing.parameters():
            parameter.normal_(generator=generator)
    taps_NM = torch.randn(5, 12, generator=generator)
    found = mixing(taps_NM)
    for layer in range(2):
        share = mixing.mix[layer].softmax(dim=0)
        mixed = sum(
            share[t] * mixing.gain[4 * t : 4 * t + 4] * taps_NM[:, 4 * t : 4 * t + 4]
            for t in range(3)
        )
        normed = mixed / (mixed.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(found[:, layer], normed * mixing.norms[layer])


def test_a_mixing_drafter_is_saved_loaded_and_served_losslessly(tmp_path: Path):
    target = toy_target()
    drafter = toy_drafter(target, num_hidden_layers=2, tap_mixing=True)
    provenance = Provenance(
        target_name="toy", target_fingerprint="x", target_dtype="float32", template_hash=None
    )
    save_drafter(drafter, tmp_path / "d", provenance=provenance)
    with pytest.warns(UserWarning, match="trained for toy"):
        loaded = load_drafter(tmp_path / "d", target)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert "fc.weight" not in drafter.state_dict()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = LLM(target).generate([[5, 6, 7]], params)[0]
    drafted = LLM(target, drafter=loaded).generate([[5, 6, 7]], params)[0]
    assert list(drafted.token_ids) == list(plain.token_ids)
