"""What the answers themselves tell: whether they are the target's own, and whether they run in circles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")
Tokens = Sequence[int]

LOOP_SIZE, LOOP_TIMES = 8, 4


def loops(token_ids: Tokens, size: int = LOOP_SIZE, times: int = LOOP_TIMES) -> bool:
    """Whether some run of `size` tokens occurs `times` times or more; occurrences may overlap.

    Such answers are easy to guess, so a mean over them says little about a drafter.
    """
    runs = Counter(tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))
    return max(runs.values(), default=0) >= times


def identical_share(answers: Mapping[Key, Sequence[Tokens]], reference: Mapping[Key, Tokens]) -> float:
    """Share of the prompts to which every answer is, token by token, the reference's."""
    same = [all(list(tokens) == list(reference[key]) for tokens in each) for key, each in answers.items()]
    return sum(same) / len(same)


def looping_share(answers: Mapping[Key, Sequence[Tokens]]) -> float:
    """Share of the prompts to which some answer loops."""
    return sum(any(map(loops, each)) for each in answers.values()) / len(answers)
