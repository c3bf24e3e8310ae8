import pytest
import torch

from dspark.algorithms import losses
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig
from dspark.training.slot_pass import Batch, Slots
from dspark.training.validation import validate
from tests.data.toy_answers import answer, random_answers
from tests.toys import VOCAB_SIZE, toy_target
from tests.training.toy_training import batch_of, log_sum_exp_of, trainable_drafter


def test_tau_is_one_plus_the_summed_survivals_of_whole_blocks():
    target = toy_target()
    objective = Objective(
        slot_pass_of(trainable_drafter(target)),
        config=ObjectiveConfig(),
        target_head=log_sum_exp_of(target),
    )
    item = answer(0, prompt=[5, 6], ids=list(range(7, 16)))
    batches = [batch_of(target, [item], [[2, 4, 8]]), batch_of(target, [item], [[3]])]
    found = validate(objective, batches, input_scale_M=None)
    assert found is not None
    rates = []
    for batch in batches:
        outcome = objective(batch, normaliser=1.0, input_scale_M=None)
        assert outcome.head.acceptance_N is not None
        rates += outcome.head.acceptance_N.tolist()
    whole = torch.tensor([rates[0:4], rates[4:8], rates[10:14]], dtype=torch.float64)
    assert found.num_blocks == 4  # the block at 8 has two supervised slots: rates 8 and 9
    assert found.tau == pytest.approx(1.0 + whole.cumprod(dim=1).sum(dim=1).mean().item())
    expected_1 = (whole[:, 0].sum().item() + rates[8]) / 4
    assert found.acceptance_K[0] == pytest.approx(expected_1)
    assert found.acceptance_K[3] == pytest.approx(whole[:, 3].mean().item())
    assert found.confidence_error is not None
    assert 0.0 < found.confidence_error < 1.0


def test_there_is_nothing_to_say_without_batches_or_without_the_target():
    target = toy_target()
    drafter = trainable_drafter(target, enable_confidence_head=False)
    config = ObjectiveConfig(weights=losses.LossWeights(ce=1.0, l1=0.0, confidence=0.0))
    objective = Objective(slot_pass_of(drafter), config=config, target_head=log_sum_exp_of(target))
    assert validate(objective, [], input_scale_M=None) is None
    batch = batch_of(target, random_answers(1, vocab_size=VOCAB_SIZE - 1), [[3]])
    assert validate(objective, [batch], input_scale_M=None) is None


def test_a_drafter_that_is_the_target_has_the_largest_tau():
    """UC-112: every slot is a real prediction, slot 0 too: tau is block_size + 1."""
    target = toy_target()

    class Oracle:
        """Hands out the target's own last hidden states as the drafter's."""

        def __init__(self) -> None:
            self.inner = slot_pass_of(trainable_drafter(target, enable_confidence_head=False))

        def slots(self, batch: Batch, taps_TM: torch.Tensor) -> Slots:
            return Slots(hidden_ND=batch.last_ND)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    objective = Objective(Oracle(), config=ObjectiveConfig(), target_head=log_sum_exp_of(target))
    item = answer(0, prompt=[5, 6], ids=list(range(7, 16)))
    found = validate(objective, [batch_of(target, [item], [[2, 4]])], input_scale_M=None)
    assert found is not None
    assert found.tau == pytest.approx(4 + 1, abs=1e-4)
    assert found.agreement_K == (1.0, 1.0, 1.0, 1.0)
