"""The heads that ride on the backbone: the sequential head and the confidence head.

They see the hidden states of one block and the tokens drawn so far. They know no sampling, no
request, no target. Shape letters: legend in core.py, and r for the rank of the sequential head.
"""

from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional


class SequentialKind(StrEnum):
    """How a slot's bias depends on what was drawn before it (method section 3)."""

    VANILLA = "vanilla"  # Eq. 5: the last token alone
    GATED = "gated"  # the last token, gated by the slot's hidden state
    RNN = "rnn"  # Eq. 6: a state carried over the block


class SequentialHead(nn.Module):
    """Adds to the base logits of a slot a bias that depends on the tokens drawn before it.

    `markov_w1` is indexed by TARGET ids, `markov_w2` answers in the draft vocabulary; with a
    draft vocabulary the caller maps a drawn id through `d2t` before it is embedded here.
    """

    def __init__(
        self,
        kind: SequentialKind,
        *,
        hidden_size: int,
        rank: int,
        vocab_size: int,
        draft_vocab_size: int,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind is SequentialKind.GATED:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind is SequentialKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, num_rows: int) -> Tensor | None:
        """The state [R, r] before the first slot; `None` for the kinds that carry none."""
        if self.kind is not SequentialKind.RNN:
            return None
        return self.markov_w1.weight.new_zeros(num_rows, self.rank)

    def embed(self, prev_ids: Tensor) -> Tensor:
        """Target ids of any shape [..] to rows e_[..]r of W1, for both heads."""
        embedded: Tensor = self.markov_w1(prev_ids)
        return embedded

    def step(
        self, e_Rr: Tensor, hidden_RD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Serving, one slot: the bias [R, S] of this slot and the state for the next one."""
        feature_Rr, state = self._feature(e_Rr, hidden_RD, state)
        return self.project(feature_Rr), state

    def project(self, feature_r: Tensor) -> Tensor:
        """Features [.., r] of any slots to their bias [.., S]: the product with W2."""
        bias: Tensor = self.markov_w2(feature_r)
        return bias

    def unroll_features(self, prev_ids_RK: Tensor, hidden_RKD: Tensor) -> Tensor:
        """Teacher forced: what W2 is applied to, [R, K, r], for a loss that works in chunks.

        `prev_ids_RK[:, k]` is the token before slot k's prediction: the anchor for k = 0.
        """
        e_RKr = self.embed(prev_ids_RK)
        if self.kind is not SequentialKind.RNN:
            return self._feature(e_RKr, hidden_RKD, None)[0]
        state = self.initial_state(len(prev_ids_RK))
        features = []
        for e_Rr, hidden_RD in zip(e_RKr.unbind(1), hidden_RKD.unbind(1), strict=True):
            feature_Rr, state = self._feature(e_Rr, hidden_RD, state)
            features.append(feature_Rr)
        return torch.stack(features, dim=1)

    def unroll(self, prev_ids_RK: Tensor, hidden_RKD: Tensor) -> Tensor:
        """Teacher forced: the bias [R, K, S] of all slots, equal to K calls of `step`."""
        return self.project(self.unroll_features(prev_ids_RK, hidden_RKD))

    def _feature(
        self, e_r: Tensor, hidden_D: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        match self.kind:
            case SequentialKind.VANILLA:
                return e_r, None
            case SequentialKind.GATED:
                gate_r = torch.sigmoid(self.gate_proj(torch.cat((hidden_D, e_r), dim=-1)))
                return gate_r * e_r, None
            case SequentialKind.RNN:
                assert state is not None, "the rnn head carries a state from slot to slot"
                joint = self.joint_proj(torch.cat((state, e_r, hidden_D), dim=-1))
                gate_r, candidate_r, output_r = joint.chunk(3, dim=-1)
                keep_r = torch.sigmoid(gate_r)
                # The output reads the state BEFORE the update, as the published weights expect.
                next_r = keep_r * state + (1 - keep_r) * torch.tanh(candidate_r)
                return torch.tanh(output_r), next_r


class ConfidenceHead(nn.Module):
    """Eq. 7 as a logit: c_k = sigmoid(w . [H_k ; W1[x_{k-1}]] + b), the product in float32.

    It may read x_{k-1} and never x_k, the token it judges.
    """

    def __init__(self, *, hidden_size: int, rank: int) -> None:
        """`rank` 0: the head reads the hidden state alone."""
        super().__init__()
        self.hidden_size = hidden_size
        self.rank = rank
        self.proj = _Row(hidden_size + rank)

    def forward(self, hidden_D: Tensor, e_r: Tensor | None) -> Tensor:
        """Hidden [.., D] and embedded previous token [.., r] to logits [..], float32."""
        assert (e_r is not None) == (self.rank > 0), "previous tokens go in exactly if rank > 0"
        sizes = [self.hidden_size, self.rank]
        weight_D, weight_r = torch.split(self.proj.weight[0].float(), sizes)
        logits = torch.matmul(hidden_D.float(), weight_D) + self.proj.bias.float()
        return logits if e_r is None else logits + functional.linear(e_r.float(), weight_r)


class _Row(nn.Module):
    """A linear layer of one output; not `nn.Linear`, so that packing leaves it as it is."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, num_inputs))
        self.bias = nn.Parameter(torch.empty(1))
