import torch

from dspark.core import AttentionLayout
from dspark.data.hidden_states import OnlineStates
from tests.data.toy_answers import answer, random_answers
from tests.toys import VOCAB_SIZE, toy_target

TAPS = (0, 1)


def test_online_states_are_those_of_each_answer_alone():
    """UC-114: packed answers do not see each other."""
    target, answers = toy_target(), random_answers(5, vocab_size=VOCAB_SIZE)
    online = OnlineStates(target, tap_layers=TAPS)
    for item, together in zip(answers, online.read(answers), strict=True):
        (alone,) = online.read([item])
        torch.testing.assert_close(together.taps_NM, alone.taps_NM, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.last_ND, alone.last_ND, atol=1e-5, rtol=1e-5)


def test_states_of_one_pass_and_of_four_chunks_agree():
    """UC-126: what training reads of a long text is what serving feeds chunk by chunk."""
    target = toy_target()
    item = answer(0, prompt=[5, 6, 7], ids=[8 + i % 30 for i in range(37)])
    (whole,) = OnlineStates(target, tap_layers=TAPS).read([item])
    pages = target.allocate_pages(num_pages=1, page_size=64)
    ids_T = item.ids()
    for part in torch.arange(len(ids_T)).tensor_split(4):
        end = int(part[-1]) + 1
        output = target.forward(
            ids_T[part], layout=chunk_layout(part, end), pages=pages, tap_layers=TAPS
        )
        torch.testing.assert_close(output.taps_NM, whole.taps_NM[part], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.hidden_ND, whole.last_ND[part], atol=1e-5, rtol=1e-5)


def chunk_layout(positions_N: torch.Tensor, end: int) -> AttentionLayout:
    """One request's next chunk, all of its positions in one page."""
    return AttentionLayout(
        block_tables_RP=torch.zeros(1, 1, dtype=torch.int32),
        query_starts_R1=torch.tensor([0, len(positions_N)], dtype=torch.int32),
        visible_N=(positions_N + 1).to(torch.int32),
        positions_N=positions_N,
        slots_N=positions_N,
        max_visible=end,
    )
