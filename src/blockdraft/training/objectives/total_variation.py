"""Total variation `1 - sum_v min(p_v, q_v)`: the probability that a sampled guess is rejected. It is half of the L1
distance that some papers use."""

from __future__ import annotations

from torch import Tensor

from blockdraft.training.objectives.base import Slots, acceptance

DECAYED = True
NEEDS_TEACHER = True


def losses(slots: Slots) -> Tensor:
    return 1 - acceptance(slots)
