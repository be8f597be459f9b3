"""How far drawn guesses are accepted, and what their rejection leaves of the target's law.

A guess drawn from q is offered too often where q is above p. The rule rejects just enough of these and then draws from
a residual `max(p - c q, 0)`, normalised; with the factor c = 1 it is that of plain rejection sampling (arXiv
2211.17192). Only the tokens that q can offer matter to the rule: p and q hold the K probabilities of these, and the
rest of p is what is missing to 1. All tensors are float64.

Rounding cannot hurt. A guess of p = 0 is never accepted, since its number in [0, 1) is never below 0. The chance that a
residual is reached is its mass, so one that rounding has made up or emptied is about as rare as rounding is small; an
empty one is replaced by p, so that even then no token of p = 0 is drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def residual_mass(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """Sum of `max(p - c q, 0)` over the vocabulary.

    Args:
        p, q: `[..., K]`; p is 0 where q is.
        c: `[...]`; may be infinite.
    """
    outside = (1 - p.sum(dim=-1)).clamp(min=0)
    return outside + torch.where(q > 0, p - c.unsqueeze(-1) * q, 0.0).clamp(min=0).sum(dim=-1)


def block_chances(p_RNK: Tensor, q_RNK: Tensor, guess_p_RN: Tensor, guess_q_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification of chains (arXiv 2403.10444, algorithm 2): all guesses of a chain are judged together.

    With the paper's ratio `r_i = min(1, r_{i-1} p(x_i) / q(x_i))` this computes c = 1 / r. Its chance
    `h_i = S_i / (S_i + 1 - r_i)`, `S_i = sum max(r_i p - q, 0)`, is then `m / (m + c - 1)` with m the mass of the
    residual. The node after which nothing was drawn has q = 0, so m = 1, h = r and the residual p: no special case.

    Args:
        p_RNK, q_RNK: Laws after the N nodes of R chains.
        guess_p_RN, guess_q_RN: p and q, at the node before, of the token of each node; both 0 at nodes that fill up
            a row. Node 0 is the anchor, whose entries are not read.

    Returns:
        chances: `[R, N]`; the last node whose number is below its chance ends the path. That of the anchor is 1.
        c: `[R, N]`, the factor of the residual where a path ends.
    """
    factors = [torch.ones_like(guess_p_RN[:, 0])]
    for p, q in zip(guess_p_RN.unbind(1)[1:], guess_q_RN.unbind(1)[1:], strict=True):
        factors.append(torch.where(p > 0, factors[-1] * q / p, torch.inf).clamp(min=1))
    c = torch.stack(factors, dim=1)
    mass = residual_mass(p_RNK, q_RNK, c)
    # With c = 1 the chance is 1, also where p equals q and no mass is left: whatever follows is then accepted later.
    return torch.where(c == 1, 1.0, mass / (mass + c - 1)), c


def accept_block(
    p_RNK: Tensor, q_RNK: Tensor, guess_p_RN: Tensor, guess_q_RN: Tensor, tests_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain, given numbers in [0, 1) for its nodes.

    Returns:
        last: `[R]` int64, the last accepted node.
        c: `[R]`, the factor of the residual that the next token is drawn from.
    """
    chances, c = block_chances(p_RNK, q_RNK, guess_p_RN, guess_q_RN)
    accepted = tests_RN < chances
    accepted[:, 0] = True
    last = torch.where(accepted, torch.arange(accepted.size(1)), 0).amax(dim=1)
    return last, c.gather(1, last.unsqueeze(1)).squeeze(1)
