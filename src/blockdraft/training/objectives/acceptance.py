"""Negative log acceptance `-log sum_v min(p_v, q_v)`: steep where the drafter hardly ever agrees."""

from __future__ import annotations

from torch import Tensor

from blockdraft.training.objectives.base import Slots
from blockdraft.training.objectives.base import acceptance as acceptance_of

DECAYED = True
NEEDS_TEACHER = True

LEAST = 1e-5  # below this the loss is flat, so that one hopeless slot cannot rule a batch


def losses(slots: Slots) -> Tensor:
    return -acceptance_of(slots).clamp(min=LEAST).log()
