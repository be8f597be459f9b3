"""The proposal: a tree of guessed tokens rooted at the anchor. A chain is a tree of width one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseLaw:
    """Laws over a few tokens each: node j of a row drew its children from `probs[j]` over `ids[j]`.

    Attributes:
        ids: `[M, K]` int64, distinct tokens after the first M nodes, of which the last one draws no more; of several
            rows or depths before there is a proposal, `[..., K]`.
        probs: Of the same shape, float32, each row summing to 1; every other token has probability 0.
    """

    ids: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Proposal:
    """Guesses of one cycle.

    Attributes:
        tokens: `[B, N]` int64; node 0 is the anchor, the last committed token, not yet in the target's cache.
        parents: `[B, N]` int64 on the CPU, whatever the device of the tokens: what shape a tree has is known to the
            host, and no one should have to wait for a GPU to ask. `parents[b, i] < i` for i > 0, and -1 for node 0. A
            row with fewer guesses than the others is filled up with nodes whose parent is -1 too; nothing accepts them.
        q: For each row the laws that its guesses were drawn from at random, each from the law of the node before; None
            for a row whose guesses were chosen (argmax, top-k, n-gram, ...). None instead of a tuple where every row's
            guesses were chosen. The nodes that have laws, from node 0 on, are a chain, and how many they are must not
            depend on what was drawn. Nodes behind them were chosen; they may follow any node and depend on all.
        expected: For each row the number of guesses that the drafter's probabilities let expect to be accepted; None
            where that was not computed.
        chances: For each row the chance of each guess to be accepted with all before it on its path, in the order of
            the nodes, without those that fill up; None where that was not computed.
    """

    tokens: Tensor
    parents: Tensor
    q: tuple[SparseLaw | None, ...] | None = None
    expected: tuple[float, ...] | None = None
    chances: tuple[tuple[float, ...], ...] | None = None

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`parents` as lists of numbers."""
        return self.parents.tolist()

    @cached_property
    def depth_lists(self) -> list[list[int]]:
        """For each row the distance of each node from the anchor; 0 for nodes that fill up a row."""
        return _depth_lists(self.parent_lists)

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.parents.shape and self.tokens.ndim == 2
        assert self.tokens.dtype == self.parents.dtype == torch.int64
        assert self.parents.device.type == "cpu"


def chain(tokens_BN: Tensor) -> Proposal:
    """Propose each row's tokens one after the other; `tokens_BN[:, 0]` is the anchor."""
    return Proposal(tokens_BN, chain_parents(*tokens_BN.shape))


@lru_cache(maxsize=256)
def chain_parents(batch: int, count: int) -> Tensor:
    """Parents `[B, N]` of chains; the same tensor each time, never to be written to."""
    return torch.arange(-1, count - 1).expand(batch, count)


def is_chain(parents_BN: Tensor) -> bool:
    return torch.equal(parents_BN, chain_parents(*parents_BN.shape))


def depths(parents_BN: Tensor) -> Tensor:
    """Distance of each node from the anchor, `[B, N]` int64 on the CPU; 0 for nodes that fill up a row."""
    if is_chain(parents_BN):
        return chain_parents(parents_BN.size(0), parents_BN.size(1) + 1)[:, 1:]  # 0, 1, 2, ...
    return torch.from_numpy(np.array(_depth_lists(parents_BN.tolist())))


def _depth_lists(parents: list[list[int]]) -> list[list[int]]:
    rows = []
    for row in parents:
        rows.append(depths_so_far := list[int]())
        for parent in row:
            depths_so_far.append(0 if parent < 0 else depths_so_far[parent] + 1)
    return rows


def tree_mask(parents_BN: Tensor) -> Tensor:
    """Who may attend to whom inside a proposal.

    Returns:
        `[B, N, N]` bool on the CPU; `[b, i, j]` is True where node j is node i or one of its ancestors.
    """
    batch, count = parents_BN.shape
    if is_chain(parents_BN):
        return torch.ones(count, count, dtype=torch.bool).tril().expand(batch, count, count)
    # A row of the mask is one number whose bits are the nodes: a few operations on numbers take less time than one on
    # tensors.
    size = (count + 7) // 8
    data = bytearray()
    for parents in parents_BN.tolist():
        masks = list[int]()
        for node, parent in enumerate(parents):
            masks.append(1 << node | (0 if parent < 0 else masks[parent]))
            data += masks[-1].to_bytes(size, "little")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return torch.from_numpy(bits.reshape(batch, count, -1)[:, :, :count].view(bool))
