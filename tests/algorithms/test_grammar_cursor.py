"""A grammar is followed along drafts and taken back: it stands where a replay would stand."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.grammar_cursor import GrammarCursor
from dspark.algorithms.late_grammar import LateGrammar
from dspark.algorithms.logit_state import LogitState
from dspark.core import Grammar, SamplingParams
from dspark.errors import InputError
from tests.algorithms.toy_grammar import ToyGrammar, ToyMatcher, pairs_then_end

A, B, C, EOS = range(4)
VOCAB = 6
PAIRS = pairs_then_end(A, B, C, EOS, vocab_size=VOCAB)
LATE = LateGrammar(grammar=PAIRS, marker=[5, 4], end_ids=[EOS])


def replayed(grammar: Grammar, tokens: Sequence[int]) -> list[int] | None:
    """What may follow `tokens`, by a new matcher; `None` where nothing is asked."""
    matcher = grammar.matcher()
    for token in tokens:
        if matcher.is_finished or not matcher.accept(token):
            return None
    return None if matcher.is_finished else matcher.allowed().nonzero()[:, 0].tolist()


def asked(cursor: GrammarCursor, drafted: Sequence[int]) -> list[int] | None:
    bans_V = cursor.bans(drafted)
    if bans_V is None:
        return None
    assert set(bans_V.tolist()) <= {0.0, -math.inf}
    return (bans_V == 0.0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("grammar", [PAIRS, LATE], ids=["plain", "late"])
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(st.integers(-1, VOCAB), max_size=5),  # drafted, ids that are none among them
            st.lists(st.integers(0, 5), max_size=6),  # which prefixes are asked for
            st.integers(0, 5),  # accepted
        ),
        max_size=6,
    ),
    data=st.data(),
)
def test_after_each_round_a_cursor_stands_where_a_replay_stands(
    grammar: Grammar, rounds: list[Any], data: st.DataObject
) -> None:
    """UC-041: one matcher for the whole answer, whatever was drafted and refused."""
    cursor = GrammarCursor(grammar.matcher())
    answer: list[int] = []
    for drafted, places, count in rounds:
        for place in places:
            prefix = drafted[:place]
            assert asked(cursor, prefix) == replayed(grammar, [*answer, *prefix])
        kept = drafted[: min(count, cursor.num_allowed(drafted))]
        allowed = replayed(grammar, [*answer, *kept])
        committed = [*kept, *([data.draw(st.sampled_from(allowed))] if allowed else [])]
        end = cursor.end(committed)
        cursor.commit(committed)
        answer += committed
        assert (end is not None) == (replayed(grammar, answer) is None)
        if end is not None:
            return
        assert asked(cursor, ()) == replayed(grammar, answer)


def test_drafts_are_possible_up_to_the_first_forbidden_one_and_to_the_end() -> None:
    cursor = GrammarCursor(PAIRS.matcher())
    assert cursor.num_allowed([A, B, A, A, B]) == 3
    assert cursor.num_allowed([A, B, C, EOS, A, B]) == 4
    assert cursor.num_allowed([C, EOS]) == 2
    assert cursor.num_allowed([-1]) == cursor.num_allowed([VOCAB]) == 0
    cursor.commit([A])
    assert cursor.num_allowed([B, C]) == 2


def test_what_is_drawn_behind_the_end_is_not_fed_to_the_grammar() -> None:
    """UC-043: the toy matcher fails if anything is."""
    cursor = GrammarCursor(PAIRS.matcher())
    tokens = [C, EOS, A, B]
    assert cursor.bans([C, EOS]) is None
    assert cursor.bans([C, EOS, A]) is None
    assert cursor.end(tokens) == 2
    cursor.commit(tokens)
    assert cursor.bans(()) is None
    assert cursor.num_allowed([A]) == 0


def test_a_forbidden_token_of_the_target_is_our_own_bug() -> None:
    cursor = GrammarCursor(PAIRS.matcher())
    with pytest.raises(AssertionError, match="forbidden token"):
        cursor.end([B])


def test_a_late_grammar_begins_behind_its_marker_in_the_middle_of_a_block() -> None:
    """UC-042: the marker at slots 0 and 1; slots before it are free but for the end."""
    cursor = GrammarCursor(LATE.matcher())
    free = [A, B, C, 4, 5]
    block = [5, 4, A, B]
    found = [asked(cursor, block[:j]) for j in range(5)]
    assert found == [free, free, [A, C], [B], [A, C]]
    assert cursor.num_allowed([EOS]) == 0
    cursor.commit([5, 5])
    assert cursor.num_allowed([4, B]) == 1
    with pytest.raises(InputError, match="marker of a late grammar is empty"):
        LateGrammar(grammar=PAIRS, marker=[], end_ids=[EOS])


@pytest.mark.parametrize("method", ["accept", "allowed"])
def test_a_matcher_that_fails_names_its_request(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ToyMatcher, method, broken)
    state = LogitState(
        request_id="seven",
        params=SamplingParams(grammar=PAIRS),
        prompt_ids=(1,),
        eos_ids=(EOS,),
        vocab_size=VOCAB,
    )
    ask = partial(state.shape_, torch.zeros(1, VOCAB), [()], None)
    if method == "accept":
        ask = partial(state.num_possible, [A])
    with pytest.raises(InputError, match=r"request 'seven' failed \(planted\)") as caught:
        ask()
    assert caught.value.request_id == "seven"


def test_a_grammar_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="made for 6 tokens, but the target has 9"):
        LogitState(
            request_id="0",
            params=SamplingParams(grammar=PAIRS),
            prompt_ids=(1,),
            eos_ids=(EOS,),
            vocab_size=9,
        )


def test_masks_are_asked_for_once_a_place() -> None:
    class Counted:
        def __init__(self) -> None:
            self.matcher, self.num_asked = PAIRS.matcher(), 0

        is_finished = property(lambda self: self.matcher.is_finished)

        def allowed(self) -> torch.Tensor:
            self.num_asked += 1
            return self.matcher.allowed()

        def accept(self, token_id: int) -> bool:
            return self.matcher.accept(token_id)

        def roll_back(self, num_tokens: int) -> None:
            self.matcher.roll_back(num_tokens)

    matcher = Counted()
    cursor = GrammarCursor(matcher)
    for _ in ("drafter", "target"):
        for j in range(3):
            cursor.bans([A, B][:j])
    assert matcher.num_asked == 3
    cursor.commit([A])
    cursor.bans(())
    assert matcher.num_asked == 4


def test_the_toy_grammar_is_what_it_says() -> None:
    assert replayed(PAIRS, []) == [A, C]
    assert replayed(PAIRS, [A, B, C]) == [EOS]
    assert replayed(PAIRS, [A, B, C, EOS]) is None
    assert ToyGrammar.END not in PAIRS.moves
