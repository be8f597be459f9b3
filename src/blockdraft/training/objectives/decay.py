"""Cross-entropy that counts less with the distance from the anchor (DFlash, arXiv 2602.06036, section 4)."""

from __future__ import annotations

from torch import Tensor

from blockdraft.training.objectives.base import Slots, cross_entropy

DECAYED = True
NEEDS_TEACHER = False


def losses(slots: Slots) -> Tensor:
    return cross_entropy(slots)
