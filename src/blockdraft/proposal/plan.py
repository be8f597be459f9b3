"""What one cycle asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class Plan:
    """How far to draft in one cycle, and in which way.

    Attributes:
        block_size: Most tokens on a path, anchor included; a drafter may return fewer.
        params: Of each row; a guess is best chosen or drawn under the law that the target will follow.
        tree_budget: Most guesses of each row's tree; 0 asks for chains. A drafter that has no trees returns chains.
        cycle_seconds: Time of a whole cycle with 0, 1, 2, ... guesses a row. With it only as many guesses are worth
            returning as maximise the expected tokens over this time; None asks for as many as the rest allows.
        trust: Accepted guesses over those that the drafter expected, as far as is known; with `cycle_seconds`, expected
            acceptance is multiplied by it.
        draws: `[B, block_size - 1]` float64 in [0, 1): asks for a chain of guesses drawn with these numbers, one a
            depth, whatever the tree budget. None asks for chosen guesses. A drafter that cannot draw ignores them and
            returns q None.
        draft_window, draft_passes: As in `Drafting`.
    """

    block_size: int
    params: Sequence[SamplingParams]
    tree_budget: int = 0
    cycle_seconds: Sequence[float] | None = None
    trust: float = 1.0
    draws: Tensor | None = None
    draft_window: int | None = None
    draft_passes: int | None = None
