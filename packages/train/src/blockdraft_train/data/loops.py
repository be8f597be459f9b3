"""Repetitive responses, in which small models often end when they decode greedily."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from blockdraft.engine.stats import LOOP_SIZE, LOOP_TIMES

KEPT_TOKENS = 16  # fewer tokens before the repetition are dropped


def loop_begin(token_ids: Sequence[int], size: int = LOOP_SIZE, times: int = LOOP_TIMES) -> int | None:
    """Return the index at which a response becomes repetitive, or None if it does not (`engine.loops`).

    It is the earliest second occurrence of a sequence of `size` tokens that occurs `times` times or more. So the first
    period of a periodic end comes before it.
    """
    places = defaultdict[tuple[int, ...], list[int]](list)
    for i in range(len(token_ids) - size + 1):
        places[tuple(token_ids[i : i + size])].append(i)
    return min((indices[1] for indices in places.values() if len(indices) >= times), default=None)


def before_loop(token_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Return the tokens of a response before it becomes repetitive, and whether it does.

    There are none if they would be fewer than `KEPT_TOKENS`.
    """
    begin = loop_begin(token_ids)
    if begin is None:
        return list(token_ids), False
    return list(token_ids[:begin]) if begin >= KEPT_TOKENS else [], True
