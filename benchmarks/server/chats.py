"""What is asked: chats of several kinds, made from a seed, so that no two ask for the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from blockdraft.types import Message

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


def question(random: Random) -> list[Message]:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    boxes, each = random.randint(2, 9), random.randint(3, 20)
    given = random.randint(1, boxes * each - 1)
    text = f"{name} has {boxes} boxes of {each} {thing} and gives away {given}. How many {thing} are left?"
    return [{"role": "user", "content": text}]


def code(random: Random) -> list[Message]:
    task = random.choice(TASKS).format(n=random.randint(2, 30))
    return [{"role": "user", "content": f"Write a Python function that {task}."}]


def long(random: Random) -> list[Message]:
    """A question at the end of many facts: a prompt of some hundred tokens."""
    facts = [
        f"{name} has {random.randint(2, 90)} {thing}, and {random.randint(2, 90)} {other} at home."
        for name, thing, other in ((random.choice(NAMES), *random.sample(THINGS, 2)) for _ in range(12))
    ]
    [asked] = question(random)
    return [{"role": "user", "content": " ".join([*facts, asked["content"]])}]


def chat(random: Random) -> list[Message]:
    """The third turn of a chat."""
    turns = [*question(random), {"role": "assistant", "content": f"{random.randint(2, 90)} are left."}]
    turns += [*code(random), {"role": "assistant", "content": "def f(x):\n    return x"}]
    return [*turns, *question(random)]


KINDS: tuple[tuple[Callable[[Random], list[Message]], int], ...] = (
    (question, 64),
    (code, 96),
    (long, 64),
    (chat, 96),
)


def make(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many requests: the chat, and the most tokens of its answer."""
    random, found = Random(seed), list[dict[str, Any]]()
    while len(found) < count:
        kind, tokens = KINDS[len(found) % len(KINDS)]
        request = {"messages": kind(random), "max_tokens": tokens}
        if request not in found:
            found.append(request)
    return found


def body(request: dict[str, Any], model: str, drafts: bool | None, stream: bool = True) -> dict[str, Any]:
    """The body of a chat completion, decoded greedily.

    Args:
        drafts: Whether our server drafts; None for a server that does not know the field.
    """
    found = request | {"model": model, "temperature": 0, "stream": stream}
    if stream:
        found["stream_options"] = {"include_usage": True}
    return found if drafts is None else found | {"speculation": {"enabled": drafts}}
