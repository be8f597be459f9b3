"""Objectives: losses that a recipe names and mixes by weight.

An objective is a function of `Slots` under the decorator `objective`; its name in recipes is the function's.

Letters: C blocks of a chunk, K taught slots of a block, H hidden size, V vocabulary. p is the target's distribution and
q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError

# Decay constants for the block sizes in arXiv 2602.06036; `default_gamma` scales the last one for other sizes.
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
MIN_ACCEPTANCE = 1e-5  # below it `acceptance` is flat, so that one hopeless slot cannot dominate a batch
SMOOTHING = 0.5  # a in arXiv 2605.18810: 0 ignores all slots after the first wrong one, 1 weighs by position alone
SHARPNESS = 3.0  # of the change from divergence to total variation in arXiv 2602.23881


@dataclass(frozen=True)
class Slots:
    """Taught slots of a chunk of blocks. The k-th of them, k = 1 to K, predicts the k-th token after the anchor.

    Attributes:
        hidden_CKH: Output of the draft network.
        logits_CKV: The target's head on it, scaled and capped as the drafter's configuration says.
        tokens_CL: int64, L = K + 1; the anchor and the K tokens after it in the data.
        taught_CK: bool; slots that count. Others lie beyond the document's end, or on tokens that the target did not
            write.
        teacher_CKV: The target's logits for the same K tokens, each given all tokens before it, over the vocabulary of
            `logits_CKV`. None if neither an objective nor the variant needs them.
    """

    hidden_CKH: Tensor
    logits_CKV: Tensor
    tokens_CL: Tensor
    taught_CK: Tensor
    teacher_CKV: Tensor | None = None

    @property
    def labels_CK(self) -> Tensor:
        return self.tokens_CL[:, 1:]

    @property
    def predecessors_CK(self) -> Tensor:
        """Token before each label; for the first label, the anchor."""
        return self.tokens_CL[:, :-1]


Losses: TypeAlias = Callable[[Slots], Tensor]


@dataclass(frozen=True)
class Objective:
    """A term of the loss.

    Attributes:
        losses: Function from `Slots` to the loss of each slot, `[C, K]` float32. Slots that are not taught are ignored.
        decayed: Whether slot k has the weight `exp(-(k - 1) / gamma)`; otherwise all slots have the same weight.
        needs_teacher: Whether it reads `teacher_CKV`.
    """

    losses: Losses
    decayed: bool
    needs_teacher: bool


OBJECTIVES: dict[str, Objective] = {}


def objective(*, decayed: bool, needs_teacher: bool) -> Callable[[Losses], Losses]:
    """Register the decorated function as an objective; see `Objective` for the arguments."""

    def register(losses: Losses) -> Losses:
        OBJECTIVES[losses.__name__] = Objective(losses, decayed=decayed, needs_teacher=needs_teacher)
        return losses

    return register


def find_objective(name: str) -> Objective:
    """Return the objective of this name, or raise UsageError."""
    if name not in OBJECTIVES:
        raise UsageError(f"The objective {name!r} is unknown; there are {', '.join(sorted(OBJECTIVES))}.")
    return OBJECTIVES[name]


def default_gamma(block_size: int) -> float:
    return GAMMA.get(block_size, 7.0 * block_size / 16)


def slot_weights(taught: Tensor, gamma: float | None) -> Tensor:
    """Return the weight of each slot, `[..., K]` float32.

    It is 0 if the slot is not taught, else `exp(-(k - 1) / gamma)` (arXiv 2602.06036, section 4), or 1 without gamma.
    Weights depend on `taught` alone and never on the network's output, so their sum over all processes and accumulated
    batches is known before the first backward pass.
    """
    if gamma is None:
        return taught.float()
    return taught * torch.exp(-torch.arange(taught.size(-1), device=taught.device) / gamma)


def cross_entropy(slots: Slots) -> Tensor:
    """Return `-log q(label)` of each slot, `[C, K]` float32."""
    logits = slots.logits_CKV.float().flatten(0, 1)
    return F.cross_entropy(logits, slots.labels_CK.flatten(), reduction="none").view(slots.taught_CK.shape)


def log_p_and_q(slots: Slots) -> tuple[Tensor, Tensor]:
    """Return log p of the target and log q of the drafter, both `[C, K, V]` float32."""
    assert slots.teacher_CKV is not None, "the objective needs the target's logits"
    return slots.teacher_CKV.float().log_softmax(dim=-1), slots.logits_CKV.float().log_softmax(dim=-1)


def acceptance_rate(slots: Slots) -> Tensor:
    """Return the probability that a draft token sampled from q is accepted, `sum_v min(p_v, q_v)`, `[C, K]` float32."""
    log_p, log_q = log_p_and_q(slots)
    return torch.minimum(log_p.exp(), log_q.exp()).sum(dim=-1)


@objective(decayed=True, needs_teacher=False)
def decay(slots: Slots) -> Tensor:
    """Return the cross-entropy, weighted by the distance from the anchor (DFlash, arXiv 2602.06036, section 4)."""
    return cross_entropy(slots)


@objective(decayed=False, needs_teacher=False)
def dpace(slots: Slots) -> Tensor:
    """Return the cross-entropy, weighted by how much a slot matters for the accepted length (D-PACE).

    In arXiv 2605.18810, q_k is the probability of the k-th label and `s_k = (1 - a) q_k + a`. The first k draft tokens
    are accepted with probability of about `P_k = s_1 * ... * s_k`, and the expected length is their sum. Its derivative
    by `log q_k` gives slot k the weight `w_k = P_k + P_{k+1} + ...`. Weights carry no gradient. The sum is divided by
    the number of taught slots, which keeps its proportion to other objectives.
    """
    entropy, taught = cross_entropy(slots), slots.taught_CK
    with torch.no_grad():
        smoothed = (1 - SMOOTHING) * torch.exp(-entropy) + SMOOTHING
        accepted = smoothed.masked_fill(~taught, 1.0).cumprod(dim=-1) * taught
        weights = accepted.flip(-1).cumsum(dim=-1).flip(-1)
    return weights * entropy


@objective(decayed=True, needs_teacher=True)
def forward_kl(slots: Slots) -> Tensor:
    """Return the divergence `sum_v p_v log(p_v / q_v)`, as in distillation."""
    log_p, log_q = log_p_and_q(slots)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


@objective(decayed=True, needs_teacher=True)
def total_variation(slots: Slots) -> Tensor:
    """Return the probability `1 - sum_v min(p_v, q_v)` that a sampled draft token is rejected.

    It is half of the L1 distance, which some papers use.
    """
    return 1 - acceptance_rate(slots)


@objective(decayed=True, needs_teacher=True)
def acceptance(slots: Slots) -> Tensor:
    """Return the negative log acceptance, `-log sum_v min(p_v, q_v)`: steep where drafter and target disagree."""
    return -acceptance_rate(slots).clamp(min=MIN_ACCEPTANCE).log()


@objective(decayed=True, needs_teacher=True)
def lk_hybrid(slots: Slots) -> Tensor:
    """Return the divergence while the drafter is far from the target, and total variation near it (arXiv 2602.23881).

    `l * KL(p, q) + (1 - l) * TV(p, q)` with `l = exp(-3 alpha)` for each slot; alpha is its acceptance, without
    gradient.
    """
    log_p, log_q = log_p_and_q(slots)
    p = log_p.exp()
    alpha = torch.minimum(p, log_q.exp()).sum(dim=-1)
    share = torch.exp(-SHARPNESS * alpha.detach())
    return share * (p * (log_p - log_q)).sum(dim=-1) + (1 - share) * (1 - alpha)


@objective(decayed=False, needs_teacher=True)
def block_verification(slots: Slots) -> Tensor:
    """Return the expected number of sampled draft tokens that block verification (arXiv 2403.10444) rejects.

    They are sampled from q at temperature 1. At least i draft tokens x_1, x_2, ... are accepted with probability
    `r_i = min(1, r_{i-1} p_i / q_i)`, `r_0 = 1`. This is the least of 1 and the products `p_j...p_i / q_j...q_i`,
    j = 1 to i. So the expected number that is accepted is a sum over all paths, on most of which training has no p:

        E = sum_i sum_paths q(x_1..x_i) r_i = sum_i sum_paths min over j = 0..i of q(x_1..x_j) p(x_{j+1}..x_i)

    Divided by p(x_1..x_i) the summand is the least of `w_j = q(y_1..y_j) / p(y_1..y_j)`, `w_0 = 1`, and the sum its
    mean over texts y that p writes. The mean over the last token can be taken over the whole vocabulary, as p and q are
    known there:

        E = sum_i mean over texts of sum_v min(m_i p_i(v), w_{i-1} q_i(v)),    m_i = min(w_0, ..., w_{i-1})

    So one text gives an unbiased estimate of E and of its gradient, if p itself wrote the text at temperature 1. Text
    that was written greedily or at a lower temperature gives too much weight to likely paths; still no q is better than
    p on any text. The loss of slot i is 1 minus its summand. Slots that are not taught are skipped.

    Later slots hardly count while early draft tokens are poor, so begin with a trained drafter, or mix in another
    objective. q is the distribution of `Slots.logits_CKV`, which for DFlash2 is that without its selector.
    """
    log_p, log_q = log_p_and_q(slots)
    labels_CK1 = slots.labels_CK.unsqueeze(-1)
    ratios_CK = (log_q.gather(-1, labels_CK1) - log_p.gather(-1, labels_CK1)).squeeze(-1)
    log_w_CK = F.pad(ratios_CK.masked_fill(~slots.taught_CK, 0)[:, :-1], (1, 0)).cumsum(dim=-1)
    log_m_CK = log_w_CK.cummin(dim=-1).values
    stands = torch.minimum(log_m_CK.unsqueeze(-1) + log_p, log_w_CK.unsqueeze(-1) + log_q).exp()
    return 1 - stands.sum(dim=-1)
