"""How long cycles really take, over what was measured beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 0.07  # weight of the newest cycle in a running mean
REACH = 0.5  # the same for cycles of half or twice as many guesses, over the weight for those of as many
LEAST, MOST = 0.4, 2.5  # a cycle outside these bounds met a stray delay, which is no news


class Pace:
    """Running means of measured over expected seconds, for plain cycles and for 1, 2, 4, ... guesses a row.

    Costs that are measured once err: contexts grow, machines have other work, and measuring itself meets delays.

    Args:
        most: Most guesses of a row.
    """

    def __init__(self, most: int) -> None:
        self.plain = 1.0
        self._steps = np.log2(np.maximum(np.arange(most + 1), 1))
        self._knots = np.arange(math.ceil(self._steps[-1]) + 1)
        self._ratios = np.ones(len(self._knots))
        self._factors: NDArray[np.float64] | None = None  # by guesses a row; None where the ratios have changed

    def cycle(self, expected: Sequence[float]) -> list[float]:
        """Seconds of a cycle that drafts, by guesses a row, from those that were expected."""
        found: list[float] = (self._by_guesses() * expected).tolist()
        return found

    def at(self, guesses: int, expected: Sequence[float]) -> float:
        """One entry of `cycle`."""
        return float(self._by_guesses()[guesses]) * expected[guesses]

    def _by_guesses(self) -> NDArray[np.float64]:
        if self._factors is None:
            self._factors = np.interp(self._steps, self._knots, self._ratios)
        return self._factors

    def learn(self, guesses: int | None, seconds: float, expected: float) -> None:
        """Take in a cycle.

        Args:
            guesses: Of a row; None where the cycle did not draft.
            expected: Seconds before any correction.
        """
        ratio = min(max(seconds / expected, LEAST), MOST)
        if guesses is None:
            self.plain += MEMORY * (ratio - self.plain)
        else:
            weights = MEMORY * REACH ** np.abs(self._knots - self._steps[guesses])
            self._ratios += weights * (ratio - self._ratios)
            self._factors = None
