"""How many guesses pay: a cost-aware budget (CaDDTree, arXiv 2606.01813)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def best_count(path_probs: Sequence[Sequence[float]], cycle_seconds: Sequence[float], trust: float = 1.0) -> int:
    """The number of guesses a row with which a cycle yields the most tokens a second.

    With n guesses a row is expected to commit 1 + trust * (sum of its first n path probabilities) tokens, the bonus
    included. All rows go through one forward, so they share n. Every n is tried: measured times need not be convex.

    Args:
        path_probs: For each row the chance that each guess is accepted together with all guesses before it on its
            path, in the order in which guesses are added. Rows may have different numbers of guesses.
        cycle_seconds: Time of a cycle with 0, 1, 2, ... guesses a row. More guesses than it has times for are not
            considered.
        trust: As in `Plan`.

    Returns:
        The count, 0 included; of equally good ones the smallest.
    """
    assert len(cycle_seconds) > 0 and min(cycle_seconds) > 0, "every cycle takes time"
    tokens = np.zeros(min(len(cycle_seconds), 1 + max(len(row) for row in path_probs)))
    tokens[0] = len(path_probs)
    for row in path_probs:
        gains = row[: len(tokens) - 1]
        tokens[1 : 1 + len(gains)] += trust * np.asarray(gains)
    return int(np.argmax(tokens.cumsum() / cycle_seconds[: len(tokens)]))


def next_pays(
    expected_B: Tensor, survival_B: Tensor, count: int, cycle_seconds: Sequence[float], trust: float = 1.0
) -> bool:
    """Whether one more guess a row pays, behind chains of `count` guesses that are made one after the other.

    It is taken to be as likely as the last one.

    Args:
        expected_B: Guesses of each row that are expected to be accepted.
        survival_B: The chance that all of them are; 0 for a row that gets no more.
        cycle_seconds, trust: As in `Plan`.
    """
    now, more = (len(found) + trust * float(found.sum()) for found in (expected_B, expected_B + survival_B))
    return more / cycle_seconds[count + 1] > now / cycle_seconds[count]
