import numpy as np

from dspark.engine.live_terms import LiveTerms

SHELF = np.array([1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
"""Three drafted tokens cost nothing."""


def blocks(survival: float) -> np.ndarray:
    return np.full((2, 4, 3), survival, dtype=np.float32)


def test_terms_follow_recent_decisions_and_not_the_last_one_alone() -> None:
    terms = LiveTerms()
    for _ in range(8):
        found = terms.decided(blocks(0.2), second=1.0, verify_B=SHELF)
    assert found.most == 3
    assert found.price < 0.2
    dear = 1.0 + 0.5 * np.arange(7)
    assert terms.decided(blocks(0.2), second=1.0, verify_B=dear).most == 3
    for _ in range(8):
        found = terms.decided(blocks(0.2), second=1.0, verify_B=dear)
    assert found.most == 0 or found.price >= 0.2


def test_numbers_of_requests_are_told_apart() -> None:
    terms = LiveTerms()
    assert terms.decided(blocks(0.2), second=1.0, verify_B=SHELF).most == 3
    dear = 1.0 + 0.5 * np.arange(7)
    found = terms.decided(blocks(0.2)[:1], second=1.0, verify_B=dear)
    assert found.most == 0 or found.price >= 0.2
