"""Distillation: the divergence `sum_v p_v log(p_v / q_v)` of the drafter's law q from the target's law p."""

from __future__ import annotations

from torch import Tensor

from blockdraft.training.objectives.base import Slots, log_laws

DECAYED = True
NEEDS_TEACHER = True


def losses(slots: Slots) -> Tensor:
    log_p, log_q = log_laws(slots)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
