"""Chats of several kinds, made from a seed, no two alike."""

from __future__ import annotations

from itertools import cycle
from random import Random
from typing import Any

NAMES = ("Tom", "Sara", "Ben", "Ann", "Mia", "Leo", "Eva", "Max")
THINGS = ("pens", "apples", "stickers", "books", "rolls", "shells", "stamps", "marbles")
TASKS = (
    "returns the sum of the numbers above {n} of a list",
    "counts the words of at least {n} letters in a text",
    "returns every {n}th element of a list",
    "returns the {n} largest numbers of a list",
    "repeats a string {n} times with a dash in between",
    "says whether a number is a multiple of {n}",
)


def question(random: Random) -> str:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    boxes, each = random.randint(2, 9), random.randint(3, 20)
    given = random.randint(1, boxes * each - 1)
    return f"{name} has {boxes} boxes of {each} {thing} and gives away {given}. How many {thing} are left?"


def code(random: Random) -> str:
    return f"Write a Python function that {random.choice(TASKS).format(n=random.randint(2, 30))}."


def long(random: Random) -> str:
    """Return a question at the end of many facts: a prompt of some hundred tokens."""
    facts = [
        f"{name} has {random.randint(2, 90)} {thing}, and {random.randint(2, 90)} {other} at home."
        for name, thing, other in ((random.choice(NAMES), *random.sample(THINGS, 2)) for _ in range(12))
    ]
    return " ".join([*facts, question(random)])


def third_turn(random: Random) -> list[str]:
    said = [question(random), f"{random.randint(2, 90)} are left.", code(random), "def f(x):\n    return x"]
    return [*said, question(random)]


KINDS = ((question, 64), (code, 96), (long, 64), (third_turn, 96))  # with the most tokens of an answer


def make(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return different requests: each is a chat and the maximum length of its response."""
    random, found = Random(seed), list[dict[str, Any]]()
    while len(found) < count:
        kind, tokens = KINDS[len(found) % len(KINDS)]
        said = kind(random)
        turns = [said] if isinstance(said, str) else said
        roles = cycle(("user", "assistant"))
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        request = {"messages": messages, "max_tokens": tokens}
        if request not in found:
            found.append(request)
    return found


def body(request: dict[str, Any], model: str, drafts: bool | None, stream: bool = True) -> dict[str, Any]:
    """Return the body of a greedy chat completion.

    Args:
        drafts: Whether our server drafts; None for a server that does not know the field.
    """
    found = request | {"model": model, "temperature": 0, "stream": stream}
    if stream:
        found["stream_options"] = {"include_usage": True}
    return found if drafts is None else found | {"speculation": {"enabled": drafts}}
