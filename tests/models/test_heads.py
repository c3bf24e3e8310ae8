"""The sequential heads and the confidence head against their formulas."""

import pytest
import torch
from torch import nn

from dspark.models.heads import ConfidenceHead, SequentialHead, SequentialKind

KINDS = pytest.mark.parametrize("kind", list(SequentialKind))
D, R, V, S, RANK, K = 12, 3, 40, 16, 5, 4


def toy_head(kind: SequentialKind) -> SequentialHead:
    torch.manual_seed(0)
    head = SequentialHead(kind, hidden_size=D, rank=RANK, vocab_size=V, draft_vocab_size=S)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


def reference_bias(head: SequentialHead, ids_K: torch.Tensor, hidden_KD: torch.Tensor):
    """Eq. 5, the gated variant and Eq. 6, slot by slot with plain matrices."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    state, rows = torch.zeros(RANK), []
    for token, hidden in zip(ids_K, hidden_KD, strict=True):
        feature = embedded = w1[token]
        if head.kind is SequentialKind.GATED:
            gate = head.gate_proj.weight @ torch.cat((hidden, embedded)) + head.gate_proj.bias
            feature = gate.sigmoid() * embedded
        if head.kind is SequentialKind.RNN:
            joint = head.joint_proj.weight @ torch.cat((state, embedded, hidden))
            gate, candidate, output = (joint + head.joint_proj.bias).split(RANK)
            feature = output.tanh()
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        rows.append(w2 @ feature)
    return torch.stack(rows)


@KINDS
def test_unrolled_bias_follows_the_formula(kind):
    """UC-078: tokens enter as target ids (0..39), the bias has draft width (16)."""
    head = toy_head(kind)
    ids_RK, hidden_RKD = torch.randint(V, (R, K)), torch.randn(R, K, D)
    expected = [reference_bias(head, ids_RK[r], hidden_RKD[r]) for r in range(R)]
    torch.testing.assert_close(head.unroll(ids_RK, hidden_RKD), torch.stack(expected))


@KINDS
def test_steps_equal_the_unrolled_block(kind):
    head = toy_head(kind)
    ids_RK, hidden_RKD = torch.randint(V, (R, K)), torch.randn(R, K, D)
    state, biases = head.initial_state(R), []
    for slot in range(K):
        bias_RS, state = head.step(head.embed(ids_RK[:, slot]), hidden_RKD[:, slot], state)
        biases.append(bias_RS)
    torch.testing.assert_close(torch.stack(biases, dim=1), head.unroll(ids_RK, hidden_RKD))


def test_the_rnn_head_remembers_earlier_tokens_and_vanilla_does_not():
    ids_RK, hidden_RKD = torch.randint(V, (R, K)), torch.randn(R, K, D)
    changed = ids_RK.clone()
    changed[:, 0] = (changed[:, 0] + 1) % V
    for kind, remembers in ((SequentialKind.VANILLA, False), (SequentialKind.RNN, True)):
        head = toy_head(kind)
        last, last_changed = (head.unroll(ids, hidden_RKD)[:, -1] for ids in (ids_RK, changed))
        assert torch.equal(last, last_changed) != remembers


@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence_is_a_float32_logit_of_hidden_and_previous_token(rank):
    head = ConfidenceHead(hidden_size=D, rank=rank).to(torch.bfloat16)
    nn.init.normal_(head.proj.weight)
    nn.init.normal_(head.proj.bias)
    hidden_RKD = torch.randn(R, K, D).to(torch.bfloat16)
    e_RKr = torch.randn(R, K, RANK).to(torch.bfloat16) if rank else None
    features = hidden_RKD if e_RKr is None else torch.cat((hidden_RKD, e_RKr), dim=-1)
    expected = nn.functional.linear(
        features.double(), head.proj.weight.double(), head.proj.bias.double()
    )
    logits = head(hidden_RKD, e_RKr)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, expected.squeeze(-1).float())


@KINDS
def test_heads_train_every_parameter(kind):
    head = toy_head(kind)
    head.unroll(torch.arange(V).view(-1, K), torch.randn(V // K, K, D)).square().sum().backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in head.parameters())
