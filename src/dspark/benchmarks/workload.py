"""The prompts that the measuring commands run. Our own words; it knows no engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One user turn and the domain it is counted under."""

    domain: str
    text: str


_MATH = (
    "A baker fills 7 trays with 12 rolls each and sells 59 of them before noon. How many rolls are "
    "left? Work it out step by step.",
    "A train leaves at 9:40 and drives 3 hours and 35 minutes at 80 km per hour. When does it "
    "arrive and how far has it gone? Show every step.",
    "Nina saves 15 euros a week. A bicycle costs 240 euros and the shop takes 10 percent off. How "
    "many weeks must she save? Explain each step.",
    "Solve the equation 3x + 7 = 25 and check the result. Explain what you do in each line.",
    "A garden is 14 metres long and 9 metres wide. A path of 1 metre runs around it, outside. "
    "What is the area of the path? Reason step by step.",
)
_CODE = (
    "Write a Python function that returns the n-th Fibonacci number with a loop, with a docstring "
    "and a few examples of its use.",
    "Write a Python class for a bank account with deposit, withdraw and balance, and show how to "
    "use it.",
    "Write a Python program that reads a text file, counts how often each word occurs and prints "
    "the ten most common words.",
    "Write a function in JavaScript that checks whether a string is a palindrome, then explain the "
    "code line by line.",
    "Write a Python function for binary search in a sorted list and explain how it works.",
)
_CHAT = (
    "Give me a plan for a quiet weekend at home, from Saturday morning to Sunday evening.",
    "Write a friendly letter to a neighbour who looked after my cat while I was away.",
    "What should I think about before I adopt a dog? Give me a list with reasons.",
    "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
)

_SINGLE = (
    "I am going to visit a small town by the sea with two friends next month. Please write a long "
    "and detailed plan for the three days, and say what it costs.",
    "Write a long story about an old clockmaker who repairs the clock of a town hall and finds a "
    "letter hidden behind its face. Give all people names.",
    "Explain in detail how bread is made, from the grain in the field to the loaf on the table, "
    "and say why each of these steps is needed.",
    "Write a Python program that keeps a list of books with title, author and year, and lets the "
    "user add, find and print them. Explain the code.",
)


def demo_prompts(num_prompts: int) -> Sequence[Prompt]:
    """The first prompts over math, code and chat in turn, at most as many as there are.

    Raises `InputError` for a number outside of 1..15.
    """
    rows = zip(_MATH, _CODE, _CHAT, strict=True)
    prompts = [
        Prompt(domain=domain, text=text)
        for row in rows
        for domain, text in zip(("math", "code", "chat"), row, strict=True)
    ]
    if not 1 <= num_prompts <= len(prompts):
        raise InputError(
            f"prompts is {num_prompts}, but the demo has between 1 and {len(prompts)} prompts."
        )
    return prompts[:num_prompts]


def single_prompts() -> Sequence[Prompt]:
    """Requests for long answers; with SmolLM2's chat template each is about 64 tokens."""
    return [Prompt(domain="chat", text=text) for text in _SINGLE]
