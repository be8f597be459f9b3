"""Guesses that block verification (arXiv 2403.10444) is expected to reject, of those sampled from q at temperature 1.

Guesses x_1, x_2, ... stand up to at least the i-th with probability `r_i = min(1, r_{i-1} p_i / q_i)`, `r_0 = 1`, which
is the least of 1 and the products `p_j...p_i / q_j...q_i`, j = 1 to i. So the expected number that stands is a sum over
all paths, on most of which training has no p:

    E = sum_i sum_paths q(x_1..x_i) r_i = sum_i sum_paths min over j = 0..i of q(x_1..x_j) p(x_{j+1}..x_i)

Divided by p(x_1..x_i) the summand is the least of `w_j = q(y_1..y_j) / p(y_1..y_j)`, `w_0 = 1`, and the sum its mean
over texts y that p writes. The mean over the last token can be taken over the whole vocabulary, as p and q are known
there:

    E = sum_i mean over texts of sum_v min(m_i p_i(v), w_{i-1} q_i(v)),    m_i = min(w_0, ..., w_{i-1})

So one text gives an estimate that is exact in the mean, and so is its gradient, where p itself wrote the text, at
temperature 1. Of text that was written greedily or at a lower temperature likely paths count too much; still no q is
better than p on any text. Slot i loses 1 minus its summand. Slots that are not taught are passed over.

Where early guesses are poor, later ones hardly count: begin with a drafter, or mix in another objective. q is the
distribution of `Slots.logits_CKV`, for DFlash2 that without its selector.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockdraft.training.objectives.base import Slots, log_p_and_q

DECAYED = False
NEEDS_TEACHER = True


def losses(slots: Slots) -> Tensor:
    log_p, log_q = log_p_and_q(slots)
    of_text_CK1 = slots.labels_CK.unsqueeze(-1)
    ratios_CK = (log_q.gather(-1, of_text_CK1) - log_p.gather(-1, of_text_CK1)).squeeze(-1)
    log_w_CK = pad(ratios_CK.masked_fill(~slots.taught_CK, 0)[:, :-1], (1, 0)).cumsum(dim=-1)
    log_m_CK = log_w_CK.cummin(dim=-1).values
    stands = torch.minimum(log_m_CK.unsqueeze(-1) + log_p, log_w_CK.unsqueeze(-1) + log_q).exp()
    return 1 - stands.sum(dim=-1)
