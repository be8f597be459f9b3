"""D-PACE (arXiv 2605.18810): cross-entropy that counts as much as the slot matters for the accepted length.

With q_k the probability of the k-th label and `s_k = (1 - a) q_k + a`, the first k guesses stand with about
`P_k = s_1 * ... * s_k`, and the expected length is their sum; its derivative by `log q_k` gives slot k the weight
`w_k = P_k + P_{k+1} + ...`. Weights carry no gradient. The sum is divided by the number of taught slots, which
keeps its proportion to other objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.training.objectives.base import Slots, cross_entropy

DECAYED = False
NEEDS_TEACHER = False

SMOOTHING = 0.5  # a of the paper: 0 forgets all slots behind the first wrong one, 1 weighs by position alone


def losses(slots: Slots) -> Tensor:
    entropy, taught = cross_entropy(slots), slots.taught_CK
    with torch.no_grad():
        smoothed = (1 - SMOOTHING) * torch.exp(-entropy) + SMOOTHING
        standing = smoothed.masked_fill(~taught, 1.0).cumprod(dim=-1) * taught
        weights = standing.flip(-1).cumsum(dim=-1).flip(-1)
    return weights * entropy
