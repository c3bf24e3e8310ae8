from dataclasses import replace

import pytest
import torch

from dspark.data.answers import Answer
from dspark.data.batches import (
    AnswerBatches,
    BatchConfig,
    Order,
    draw_blocks,
    pack,
    seeded,
    split_held_out,
)
from dspark.data.hidden_states import States
from dspark.errors import InputError
from tests.data.toy_answers import answer, random_answers

VOCAB = 40


class Numbered:
    """States that tell where they come from: row t of answer i is i * 1000 + t."""

    def expect(self, answers: list[Answer]) -> None:
        self.expected = [item.id for item in answers]

    def read(self, answers: list[Answer]) -> list[States]:
        self.read_last = [item.id for item in answers]
        return [self.one(item) for item in answers]

    def one(self, item: Answer) -> States:
        rows_N = int(item.id[1:]) * 1000.0 + torch.arange(len(item.ids()))
        return States(taps_NM=rows_N[:, None].repeat(1, 3), last_ND=rows_N[:, None], lse_N=-rows_N)


def batches(answers: list[Answer], **changes: object) -> AnswerBatches:
    config = BatchConfig(block_size=3, answers_per_step=4, num_held_out=2)
    return AnswerBatches(answers, source=Numbered(), config=replace(config, **changes))


def test_an_epoch_reads_each_answer_once_in_an_order_that_changes():
    order = Order(num_sequences=10, per_step=4, seed=0)
    places = [index for step in range(5) for index in order.sequences(step)]
    assert sorted(places[:10]) == list(range(10))
    assert sorted(places[10:]) == list(range(10))
    assert places[:10] != places[10:]


def test_answers_of_a_repeated_domain_come_that_often_an_epoch():
    answers = [
        replace(a, domain="chat" if i % 3 == 0 else "math")
        for i, a in enumerate(random_answers(18, vocab_size=VOCAB))
    ]
    states = Numbered()
    config = BatchConfig(block_size=3, answers_per_step=4, num_held_out=2, repeats=(("chat", 3),))
    source = AnswerBatches(answers, source=states, config=config)
    num_chat = sum(a.domain == "chat" for a in source.train)
    num_places = len(source.train) + 2 * num_chat
    read = []
    for step in range(num_places // 4):
        source.step(step)
        read += states.read_last
    counts = {a.id: read.count(a.id) for a in source.train}
    missing = num_places % 4  # the last places of the epoch share a step with the next one
    assert sum(counts.values()) == num_places - missing
    for a in source.train:
        assert counts[a.id] <= (3 if a.domain == "chat" else 1)


def test_a_domain_that_no_answer_has_cannot_be_repeated():
    answers = random_answers(18, vocab_size=VOCAB)
    with pytest.raises(InputError, match="No answer is of domain 'poems'"):
        batches(answers, repeats=(("poems", 2),))
    with pytest.raises(InputError, match="repeats of 'chat' is 0"):
        batches(answers, repeats=(("chat", 0),))


def test_a_step_is_a_function_of_seed_and_number():
    """UC-118: order and anchors do not depend on what ran before."""
    answers = random_answers(20, vocab_size=VOCAB)
    one, other = batches(answers), batches(answers)
    for step in (0, 1, 2):
        one.step(step)
    (first,), (second,) = one.step(7), other.step(7)
    assert torch.equal(first.blocks.anchors_A, second.blocks.anchors_A)
    assert torch.equal(first.taps_TM, second.taps_TM)
    (third,) = batches(answers, seed=1).step(7)
    assert not torch.equal(first.labels_AK, third.labels_AK)


def test_a_batch_holds_real_context_and_real_slots_only():
    """UC-107: no padding, no dummy block; rows point at supervised slots alone."""
    (batch,) = batches(random_answers(20, vocab_size=VOCAB)).step(0)
    blocks = batch.blocks
    assert len(batch.taps_TM) == sum(blocks.context_lengths)
    starts = torch.tensor([0, *blocks.context_lengths]).cumsum(0)[:-1]
    splits = torch.split(blocks.anchors_A, list(blocks.num_blocks))
    assert [int(part.max()) for part in splits] == list(blocks.context_lengths)
    firsts_A = torch.repeat_interleave(batch.taps_TM[starts, 0], torch.tensor(blocks.num_blocks))
    position_AK = blocks.anchors_A[:, None] + torch.arange(3)
    expected_AK = firsts_A[:, None] + position_AK
    assert batch.last_ND[:, 0].tolist() == expected_AK[batch.valid_AK].tolist()
    assert batch.lse_N is not None
    assert batch.lse_N.tolist() == (-expected_AK[batch.valid_AK]).tolist()
    assert batch.rows_N.tolist() == batch.valid_AK.flatten().nonzero().flatten().tolist()
    assert bool(batch.valid_AK[:, 0].all())


def test_micro_batches_hold_the_blocks_of_the_whole_step():
    answers = random_answers(20, vocab_size=VOCAB)
    (whole,) = batches(answers).step(3)
    parts = batches(answers, micro_batches=2).step(3)
    assert len(parts) == 2
    assert torch.equal(torch.cat([p.labels_AK for p in parts]), whole.labels_AK)
    assert torch.equal(torch.cat([p.taps_TM for p in parts]), whole.taps_TM)


def test_a_held_out_prompt_is_held_out_with_all_its_answers():
    answers = random_answers(12, vocab_size=VOCAB)
    twice = [*answers, *(replace(a, id=f"a{i + 50}") for i, a in enumerate(answers))]
    train, held_out = split_held_out(twice, num_prompts=3, seed=0)
    assert len(held_out) == 6
    assert len(train) == 18
    prompts = {tuple(a.prompt_token_ids) for a in held_out}
    assert not prompts & {tuple(a.prompt_token_ids) for a in train}


def test_all_turns_of_a_conversation_stay_on_one_side():
    first = random_answers(8, vocab_size=VOCAB)
    later = [
        replace(
            a,
            id=f"{a.id}/2",
            conversation=a.id,
            turn=1,
            prompt_token_ids=[*a.prompt_token_ids, *a.token_ids, 3],
        )
        for a in first
    ]
    for seed in range(4):
        train, held_out = split_held_out([*first, *later], num_prompts=3, seed=seed)
        assert (len(train), len(held_out)) == (10, 6)
        kept = {a.conversation_id for a in train}
        assert not kept & {a.conversation_id for a in held_out}


def test_more_answers_leave_a_held_out_prompt_where_it_is_or_replace_it():
    answers = random_answers(30, vocab_size=VOCAB)
    _, few = split_held_out(answers[:20], num_prompts=4, seed=0)
    _, many = split_held_out(answers, num_prompts=4, seed=0)
    kept = {a.id for a in many} & {a.id for a in answers[:20]}
    assert kept <= {a.id for a in few}


def test_held_out_batches_are_the_same_each_time_and_never_trained_on():
    source = batches(random_answers(20, vocab_size=VOCAB))
    first, second = list(source.held_out()), list(source.held_out())
    assert [b.labels_AK.tolist() for b in first] == [b.labels_AK.tolist() for b in second]
    assert not {a.id for a in source.held_out_answers} & {a.id for a in source.train}


def test_answers_without_a_block_are_counted_and_if_none_is_left_it_ends_before_step_one():
    """UC-099, UC-113."""
    empty = [answer(i, prompt=[1, 2], ids=[5]) for i in range(3)]
    source = batches([*random_answers(12, vocab_size=VOCAB), *empty])
    assert source.num_unusable >= 3
    with pytest.raises(InputError, match="No answer is left to train on"):
        batches(empty, num_held_out=0)
    with pytest.raises(InputError, match="num_held_out is 12, but there are only"):
        batches(random_answers(12, vocab_size=VOCAB), num_held_out=12)


def test_an_answer_of_two_tokens_is_one_block_of_one_slot():
    drawn = draw_blocks(
        answer(0, prompt=[1], ids=[7, 8]),
        block_size=3,
        tokens_per_anchor=3.5,
        generator=seeded(0, 0),
    )
    batch = pack([(drawn, Numbered().one(answer(0, prompt=[1], ids=[7, 8])))], block_size=3)
    assert batch.blocks.anchors_A.tolist() == [1]
    assert batch.rows_N.tolist() == [0]
    assert batch.labels_AK[0, 0].item() == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"micro_batches": 9}, "micro_batches is 9, but a step has only 4"),
        ({"tokens_per_anchor": 0.5}, "tokens_per_anchor is 0.5"),
        ({"tokens_per_anchor": float("nan")}, "tokens_per_anchor is nan"),
        ({"num_held_out": -1}, "num_held_out is -1"),
    ],
)
def test_values_that_cannot_be_are_refused(change: dict[str, float], words: str):
    config = BatchConfig(block_size=3, answers_per_step=4)
    with pytest.raises(InputError, match=words):
        replace(config, **change)


def test_context_tokens_lie_beside_their_taps():
    answers = random_answers(20, vocab_size=VOCAB)
    source = batches(answers)
    (batch,) = source.step(0)
    by_number = {int(a.id[1:]): a.ids() for a in answers}
    rows = batch.taps_TM[:, 0].long().tolist()
    assert batch.ids_T.tolist() == [int(by_number[row // 1000][row % 1000]) for row in rows]


def test_the_next_steps_answers_are_asked_for_ahead():
    answers = random_answers(20, vocab_size=VOCAB)
    config = BatchConfig(block_size=3, answers_per_step=4, num_held_out=2)
    source = Numbered()
    stream = AnswerBatches(answers, source=source, config=config)
    stream.step(4)
    announced = source.expected
    stream.step(5)
    assert source.read_last == announced


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_the_ranks_together_read_what_one_process_reads(num_ranks: int):
    """UC-120: a rank without a share gets a batch that teaches nothing."""
    answers = random_answers(20, vocab_size=VOCAB)
    config = BatchConfig(block_size=3, answers_per_step=4, num_held_out=2)
    parts = [
        AnswerBatches(answers, source=Numbered(), config=config, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    (whole,) = batches(answers).step(3)
    shares = [part.step(3)[0] for part in parts]
    busy = [share for share in shares if len(share.rows_N)]
    assert len(busy) == min(num_ranks, 4)
    assert torch.equal(torch.cat([s.labels_AK for s in busy]), whole.labels_AK)
    assert torch.equal(torch.cat([s.last_ND for s in busy]), whole.last_ND)
    idle = [share for share in shares if not len(share.rows_N)]
    assert all(not bool(s.valid_AK.any()) and len(s.taps_TM) for s in idle)
