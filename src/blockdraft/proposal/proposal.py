"""The proposal: a tree of guessed tokens rooted at the anchor. A chain is a tree of width one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseLaw:
    """Laws over a few tokens each: node j of a row drew its children from `probs[j]` over `ids[j]`.

    Attributes:
        ids: `[N, K]` int64, distinct tokens; of several rows or depths before there is a proposal, `[..., K]`.
        probs: Of the same shape, float32, each row summing to 1; every other token has probability 0.
    """

    ids: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Proposal:
    """Guesses of one cycle.

    Attributes:
        tokens: `[B, N]` int64; node 0 is the anchor, the last committed token, not yet in the target's cache.
        parents: `[B, N]` int64; `parents[b, i] < i` for i > 0, and -1 for node 0. A row with fewer guesses than the
            others is filled up with nodes whose parent is -1 too; nothing accepts them.
        q: For each row the laws that its guesses were drawn from at random, each child of a node drawn anew from that
            node's law, in the order of the nodes; None for a row whose guesses were chosen (argmax, top-k,
            n-gram, ...). None instead of a tuple where every row's guesses were chosen.
    """

    tokens: Tensor
    parents: Tensor
    q: tuple[SparseLaw | None, ...] | None = None

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
    """Distance of each node from the anchor, `[B, N]` int64; 0 for nodes that fill up a row."""
    if is_chain(parents_BN):
        return torch.arange(parents_BN.size(1), device=parents_BN.device).expand(parents_BN.shape)
    lines = list(_ancestors(parents_BN))
    steps = [above != below for below, above in pairwise(lines)]
    return sum(steps, torch.zeros_like(lines[0])).to(parents_BN.device)


def tree_mask(parents_BN: Tensor) -> Tensor:
    """Who may attend to whom inside a proposal.

    Returns:
        `[B, N, N]` bool; `[b, i, j]` is True where node j is node i or one of its ancestors.
    """
    batch, count = parents_BN.shape
    if is_chain(parents_BN):
        ones = torch.ones(count, count, dtype=torch.bool, device=parents_BN.device)
        return ones.tril().expand(batch, count, count)
    mask = torch.zeros(batch, count, count, dtype=torch.bool)
    for ancestor in _ancestors(parents_BN):
        mask.scatter_(2, ancestor.unsqueeze(2), True)
    return mask.to(parents_BN.device)


def _ancestors(parents_BN: Tensor) -> Iterator[Tensor]:
    """Each node's ancestor 0, 1, 2, ... steps up, `[B, N]` on the CPU, until no node has a further one.

    Where a node has none so far up, it is the topmost that it has. Trees are shallow, so these few steps over N
    numbers take a fraction of the time of any operation on N x N numbers.
    """
    parents_BN = parents_BN.cpu()
    ancestor = torch.arange(parents_BN.size(1)).expand(parents_BN.shape)
    up = torch.where(parents_BN < 0, ancestor, parents_BN)
    while True:
        yield ancestor
        above = up.gather(1, ancestor)
        if torch.equal(above, ancestor):
            return
        ancestor = above
