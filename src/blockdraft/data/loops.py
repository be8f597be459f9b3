"""Loops in answers. Small models often end in one when they decode greedily."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from blockdraft.engine.stats import LOOP_SIZE, LOOP_TIMES

KEPT_TOKENS = 16  # minimum number of tokens before a loop that are worth keeping


def loop_begin(token_ids: Sequence[int], size: int = LOOP_SIZE, times: int = LOOP_TIMES) -> int | None:
    """Index at which an answer begins to repeat itself; None if it does not loop (`engine.loops`).

    It is the earliest second occurrence of a sequence of `size` tokens that occurs `times` times or more. So of a
    periodic end the first period is before it.
    """
    places = defaultdict[tuple[int, ...], list[int]](list)
    for i in range(len(token_ids) - size + 1):
        places[tuple(token_ids[i : i + size])].append(i)
    return min((found[1] for found in places.values() if len(found) >= times), default=None)


def before_loop(token_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Tokens of an answer up to where it begins to loop, none if they are fewer than `KEPT_TOKENS`; and whether it
    loops."""
    begin = loop_begin(token_ids)
    if begin is None:
        return list(token_ids), False
    return list(token_ids[:begin]) if begin >= KEPT_TOKENS else [], True
