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

_PLACES = ("by the sea", "in the hills", "on a river", "near the border")
_TRADES = ("clockmaker", "bookbinder", "gardener", "glassblower")
_GOODS = (
    ("bread", "the grain in the field to the loaf"),
    ("cheese", "the grass in the meadow to the board"),
    ("paper", "the tree in the forest to the sheet"),
    ("honey", "the flowers in the meadow to the jar"),
)
_ITEMS = ("books", "songs", "plants", "recipes")
_MONTHS = ("next month", "in the spring")
_FINDS = ("a letter", "a map")
_ENDS = ("and say what it costs", "and say what to pack")


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
    """Four requests for long answers; with SmolLM2's chat template each is about 64 tokens."""
    return many_prompts(4)


def many_prompts(num_prompts: int) -> Sequence[Prompt]:
    """Different requests for long answers, of the length of `single_prompts` and beginning with it.

    Raises `InputError` for a number outside of 1..32.
    """
    texts = [
        text
        for variant in range(2)
        for number in range(4)
        for text in _long_requests(number, variant)
    ]
    if not 1 <= num_prompts <= len(texts):
        raise InputError(
            f"prompts is {num_prompts}, but there are between 1 and {len(texts)} of them."
        )
    return [Prompt(domain="chat", text=text) for text in texts[:num_prompts]]


def _long_requests(number: int, variant: int) -> Sequence[str]:
    made, way = _GOODS[number]
    return (
        f"I am going to visit a small town {_PLACES[number]} with two friends {_MONTHS[variant]}. "
        f"Please write a long and detailed plan for the three days, {_ENDS[variant]}.",
        f"Write a long story about an old {_TRADES[number]} who repairs the house of the mayor and "
        f"finds {_FINDS[variant]} hidden behind a wall. Give all people names.",
        f"Explain in detail how {made} is made, from {way} on the table, and say "
        f"{('why each of these steps is needed', 'how long each of these steps takes')[variant]}.",
        f"Write a Python program that keeps a list of {_ITEMS[number]} with title, author and "
        f"{('year', 'price')[variant]}, and lets the user add, find and print them. Explain the "
        "code.",
    )
