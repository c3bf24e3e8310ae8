import pytest
import torch

from dspark.algorithms import anchors
from dspark.data.batches import Batch, pack
from dspark.data.hidden_states import OnlineStates
from dspark.data.on_policy import OnPolicyBatches, branch_states, replayed
from dspark.errors import InputError
from tests.data.toy_answers import answer, random_answers
from tests.toys import EOS_ID, VOCAB_SIZE, toy_target
from tests.training.toy_training import TAPS, toy_batches

TARGET = toy_target()


def packed() -> Batch:
    answers = [
        answer(0, prompt=[5, 6, 7], ids=[8, 9, 10, 11, 12, 13, 14]),
        answer(1, prompt=[20, 21], ids=[22, 23, 24, 25, 26]),
    ]
    states = OnlineStates(TARGET, tap_layers=TAPS).read(answers)
    drawn = [
        anchors.blocks(item.ids(), item.loss_mask(), torch.tensor(at), block_size=3)
        for item, at in zip(answers, ([3, 5, 8], [2, 4]), strict=True)
    ]
    return pack(list(zip(drawn, states, strict=True)), block_size=3)


def test_branches_of_one_pass_equal_each_block_behind_its_own_context():
    """No block sees another; each sees its sequence strictly before its anchor, and itself."""
    batch = packed()
    ids_AK = torch.randint(3, 40, (5, 3), generator=torch.Generator().manual_seed(0))
    found = branch_states(TARGET, batch.ids_T, batch.blocks, ids_AK).view(5, 3, -1)
    contexts = torch.split(batch.ids_T, list(batch.blocks.context_lengths))
    for block, (sequence, anchor) in enumerate(((0, 3), (0, 5), (0, 8), (1, 2), (1, 4))):
        ids_T = torch.cat((contexts[sequence][:anchor], ids_AK[block]))
        alone = TARGET.states([ids_T], tap_layers=()).hidden_ND[anchor:]
        torch.testing.assert_close(found[block], alone, atol=1e-5, rtol=1e-5)


def test_a_replay_of_the_true_tokens_is_the_plain_batch():
    batch = packed()
    truth_AK = batch.labels_AK
    again = replayed(TARGET, batch, truth_AK, generator=torch.Generator().manual_seed(0))
    both = torch.isin(again.rows_N, batch.rows_N)
    torch.testing.assert_close(again.last_ND[both], batch.last_ND, atol=1e-5, rtol=1e-5)
    lse_N = TARGET.logits(again.last_ND).float().logsumexp(dim=1)
    torch.testing.assert_close(again.lse_N, lse_N, atol=1e-4, rtol=1e-5)


def test_slots_behind_a_drafted_end_of_text_teach_nothing():
    batch = packed()
    drafts_AK = torch.full((5, 3), 30)
    drafts_AK[1, 0] = EOS_ID
    drafts_AK[3, 1] = EOS_ID
    again = replayed(TARGET, batch, drafts_AK, generator=torch.Generator().manual_seed(0))
    assert again.valid_AK.sum(dim=1).tolist() == [3, 1, 3, 2, 3]
    assert again.previous_AK[:, 0].tolist() == batch.previous_AK[:, 0].tolist()
    assert len(again.last_ND) == len(again.rows_N) == 12


def test_the_share_of_replayed_steps_is_spread_evenly_and_repeats():
    inner = toy_batches(TARGET, random_answers(24, vocab_size=VOCAB_SIZE - 1))
    source = OnPolicyBatches(inner, target=TARGET, share=0.4)
    asked: list[int] = []

    def draft(batch: Batch, generator: torch.Generator) -> torch.Tensor:
        asked.append(step)
        return torch.randint(3, 40, batch.previous_AK.shape, generator=generator)

    source.follow(draft)
    for step in range(10):
        source.step(step)
    assert asked == [2, 4, 7, 9]
    step = 4
    one, other = source.step(4)[0], source.step(4)[0]
    assert torch.equal(one.labels_AK, other.labels_AK)
    assert torch.equal(one.previous_AK, other.previous_AK)
    assert source.fingerprint()["on-policy share"] == "0.4"


def test_a_share_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"on_policy is 1\.5"):
        OnPolicyBatches(toy_batches(TARGET), target=TARGET, share=1.5)
