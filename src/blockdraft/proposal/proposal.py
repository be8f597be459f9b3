"""The proposal: a tree of guessed tokens rooted at the anchor. A chain is a tree of width one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Guesses of one cycle.

    Attributes:
        tokens: `[B, N]` int64; node 0 is the anchor, the last committed token, not yet in the target's cache.
        parents: `[B, N]` int64; `parents[b, i] < i` for i > 0, and -1 for node 0.
        q: Where guesses were drawn at random, `[B, N, V]`: the law that node i was drawn from. None where guesses
            were chosen (argmax, n-gram, ...).
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.parents.shape and self.tokens.ndim == 2
        assert self.tokens.dtype == self.parents.dtype == torch.int64


def chain(tokens_BN: Tensor) -> Proposal:
    """Propose each row's tokens one after the other; `tokens_BN[:, 0]` is the anchor."""
    return Proposal(tokens_BN, chain_parents(*tokens_BN.shape).to(tokens_BN.device))


def chain_parents(batch: int, count: int) -> Tensor:
    return torch.arange(-1, count - 1).expand(batch, count)


def is_chain(parents_BN: Tensor) -> bool:
    batch, count = parents_BN.shape
    return torch.equal(parents_BN.cpu(), chain_parents(batch, count))


def depths(parents_BN: Tensor) -> Tensor:
    """Distance of each node from the anchor, `[B, N]` int64."""
    return tree_mask(parents_BN).sum(dim=-1) - 1


def tree_mask(parents_BN: Tensor) -> Tensor:
    """Who may attend to whom inside a proposal.

    Returns:
        `[B, N, N]` bool; `[b, i, j]` is True where node j is node i or one of its ancestors.
    """
    batch, count = parents_BN.shape
    if is_chain(parents_BN):
        ones = torch.ones(count, count, dtype=torch.bool, device=parents_BN.device)
        return ones.tril().expand(batch, count, count)
    mask = torch.eye(count, dtype=torch.bool, device=parents_BN.device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=parents_BN.device)
    for i in range(1, count):  # parents come before children, so the parent's row is complete
        mask[:, i] |= mask[rows, parents_BN[:, i]]
    return mask
