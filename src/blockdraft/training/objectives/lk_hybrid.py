"""LK hybrid (arXiv 2602.23881): divergence while the drafter is far off, total variation once it is near.

`l * KL(p, q) + (1 - l) * TV(p, q)` with `l = exp(-3 alpha)` of each slot, alpha its acceptance, without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.training.objectives.base import Slots, log_p_and_q

DECAYED = True
NEEDS_TEACHER = True

SHARPNESS = 3.0


def losses(slots: Slots) -> Tensor:
    log_p, log_q = log_p_and_q(slots)
    p = log_p.exp()
    alpha = torch.minimum(p, log_q.exp()).sum(dim=-1)
    share = torch.exp(-SHARPNESS * alpha.detach())
    return share * (p * (log_p - log_q)).sum(dim=-1) + (1 - share) * (1 - alpha)
