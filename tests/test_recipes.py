import pytest

from dspark.errors import InputError
from dspark.recipes import Recipe, qwen3_4b, smollm2


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


@pytest.mark.parametrize("changes", [{"num_taps": 0}, {"tap_layers": ()}])
def test_a_drafter_without_context_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least one tapped layer"):
        Recipe(**changes)
