"""The exact output distribution of one round with a scheduler in the loop, over every draft."""

from itertools import product

import numpy as np
import torch

from dspark.algorithms.acceptance import accept_probability, residual
from tests.algorithms.toy_distributions import toy_logits


def exact_output(plan, *, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Joint distribution [V, V, V, V] of two tokens of two requests, and the target's own.

    Every draft of both requests is enumerated; `plan(confidence_RK)` gets confidences of which
    the second depends on the first token, and its lengths decide what is verified.
    """
    vocab, block, requests = 2, 2, 2
    tables = []
    for r in range(requests):
        prefixes = [p for n in range(block) for p in product(range(vocab), repeat=n)]
        p = {x: toy_logits(x, vocab_size=vocab, salt=salt + 10 * r).softmax(-1) for x in prefixes}
        q = {
            x: toy_logits(x, vocab_size=vocab, salt=salt + 10 * r + 5).softmax(-1) for x in prefixes
        }
        tables.append((p, q))
    output = np.zeros((vocab,) * 4)
    for drafts in product(product(range(vocab), repeat=block), repeat=requests):
        mass, c_RK = 1.0, np.zeros((requests, block), dtype=np.float32)
        for r, (p, q) in enumerate(tables):
            for k in range(block):
                before = drafts[r][:k]
                mass *= float(q[before][drafts[r][k]])
                c_RK[r, k] = float(torch.minimum(p[before], q[before]).sum())
            # what a confidence head can see: the token before makes its successor look (un)likely
            c_RK[r, 1] *= 1.0 if drafts[r][0] == 0 else 0.05
        lengths = plan(c_RK)
        parts = [emitted_of(*tables[r], drafts[r], int(lengths[r]), vocab) for r in range(requests)]
        output += mass * np.multiply.outer(*parts)
    return output, np.multiply.outer(*[plain_of(p, vocab) for p, _ in tables])


def plain_of(p, vocab: int) -> np.ndarray:
    joint = np.zeros((vocab, vocab))
    for first, second in product(range(vocab), repeat=2):
        joint[first, second] = float(p[()][first].double() * p[first,][second].double())
    return joint


def emitted_of(p, q, draft, length: int, vocab: int) -> np.ndarray:
    """Distribution of two tokens given the draft and how much of it is verified."""
    joint, alive = np.zeros((vocab, vocab)), 1.0
    for k in range(length):
        before = draft[:k]
        p_V, q_V = p[before], q[before]
        taken = float(accept_probability(p_V[draft[k]], q_V[draft[k]]))
        rest_V = residual(p_V[None], q_V[None])[0].double().numpy()
        for token in range(vocab):
            stopped = alive * (1.0 - taken) * rest_V[token]
            if k == 0:
                joint[token] += stopped * p[token,].double().numpy()
            else:
                joint[draft[0], token] += stopped
        alive *= taken
    if length == 0:
        return plain_of(p, vocab)
    if length == 1:
        joint[draft[0]] += alive * p[draft[:1]].double().numpy()
    else:
        joint[draft] += alive
    return joint
