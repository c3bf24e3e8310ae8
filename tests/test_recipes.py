import pytest

from dspark.errors import InputError
from dspark.recipes import Recipe, of_kind, qwen3_4b, smollm2


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6, 28, 36, 80])
def test_taps_are_increasing_and_in_range_for_any_depth(num_layers: int) -> None:
    """UC-089."""
    taps = Recipe().taps(num_layers)
    assert 1 <= len(taps) <= 5
    assert sorted(set(taps)) == list(taps)
    assert taps[0] >= 0
    assert taps[-1] < num_layers


def test_the_general_rule_gives_the_paper_s_layers_for_its_own_target() -> None:
    assert Recipe().taps(36) == qwen3_4b().taps(36) == (1, 9, 17, 25, 33)


def test_the_shipped_recipe_names_its_layers() -> None:
    assert smollm2().taps(30) == (1, 7, 14, 21, 27)


def test_a_kind_sets_what_follows_from_it_and_leaves_the_budget_alone() -> None:
    """UC-086: DFlash without heads, EAGLE-3 on soft labels, MTP-1 on the last hidden state."""
    base = smollm2()
    dflash, eagle3, mtp = (of_kind(base, kind) for kind in ("dflash", "eagle3", "mtp"))
    for recipe in (dflash, eagle3, mtp):
        assert (recipe.markov_rank, recipe.has_confidence_head) == (0, False)
        assert recipe.objective.weights.confidence == recipe.objective.weights.l1 == 0.0
        assert recipe.optimizer == base.optimizer
        assert recipe.objective.positions == base.objective.positions
    assert [r.objective.weights.ce for r in (dflash, eagle3, mtp)] == [1.0, 0.0, 1.0]
    assert [r.objective.weights.kl for r in (dflash, eagle3, mtp)] == [0.0, 1.0, 0.0]
    assert [r.num_layers for r in (dflash, eagle3, mtp)] == [2, 1, 1]
    assert [r.block_size for r in (dflash, eagle3, mtp)] == [5, 5, 1]
    assert [r.taps(30) for r in (dflash, eagle3)] == [base.taps(30)] * 2
    assert mtp.taps(30) == (30,)
    assert of_kind(base, "dspark") == base
    assert base.pair_start
    assert base.state_start
    assert not dflash.pair_start
    assert not any(r.state_start for r in (dflash, eagle3, mtp))
    with pytest.raises(InputError, match="kind is 'medusa'"):
        of_kind(base, "medusa")


@pytest.mark.parametrize("changes", [{"num_taps": 0}, {"tap_layers": ()}])
def test_a_drafter_without_context_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least one tapped layer"):
        Recipe(**changes)
