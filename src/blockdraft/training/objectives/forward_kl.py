"""Distillation: the divergence `sum_v p_v log(p_v / q_v)` of the drafter's distribution q from the target's
distribution p."""

from __future__ import annotations

from torch import Tensor

from blockdraft.training.objectives.base import Slots, log_p_and_q

DECAYED = True
NEEDS_TEACHER = True


def losses(slots: Slots) -> Tensor:
    log_p, log_q = log_p_and_q(slots)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
