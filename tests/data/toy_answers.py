"""Answers of a toy target, and answers of a given shape."""

import torch

from dspark.data.answers import Answer
from dspark.models.target import Target


def answer(number: int, *, prompt: list[int], ids: list[int]) -> Answer:
    return Answer(
        id=f"a{number}",
        domain="math" if number % 2 else "chat",
        temperature=1.0,
        top_p=1.0,
        prompt_token_ids=prompt,
        token_ids=ids,
        finish_reason="length",
        text="",
    )


def random_answers(count: int, *, vocab_size: int, seed: int = 0) -> list[Answer]:
    """Random ids; prompts of 2..5 tokens, answers of 1..14."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [
        answer(
            number,
            prompt=[draw(3, vocab_size) for _ in range(draw(2, 6))],
            ids=[draw(3, vocab_size) for _ in range(draw(1, 15))],
        )
        for number in range(count)
    ]


def greedy_answer(target: Target, number: int, *, prompt: list[int], length: int) -> Answer:
    """What the target itself says, its most likely token each time."""
    ids = list(prompt)
    for _ in range(length):
        output = target.states([torch.tensor(ids)], tap_layers=())
        ids.append(int(target.logits(output.hidden_ND[-1:]).argmax()))
    return answer(number, prompt=prompt, ids=ids[len(prompt) :])
