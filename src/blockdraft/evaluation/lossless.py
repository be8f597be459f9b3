"""What the answers themselves tell: whether they are the target's own, and whether they run in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from blockdraft.engine import loops

Key = TypeVar("Key")
Tokens = Sequence[int]


def identical_share(answers: Mapping[Key, Sequence[Tokens]], reference: Mapping[Key, Tokens]) -> float:
    """Share of the prompts to which every answer is, token by token, the reference's."""
    same = [all(list(tokens) == list(reference[key]) for tokens in each) for key, each in answers.items()]
    return sum(same) / len(same)


def looping_share(answers: Mapping[Key, Sequence[Tokens]]) -> float:
    """Share of the prompts to which some answer loops."""
    return sum(any(map(loops, each)) for each in answers.values()) / len(answers)
