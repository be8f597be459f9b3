"""What one cycle asks of a drafter, and what it proposes: a tree of guessed tokens rooted at the anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from blockdraft.machine import send
from blockdraft.types import RequestDrafting, SamplingParams


@dataclass(frozen=True)
class SparseDistribution:
    """Distributions over a few tokens each: node j of a row drew its children from `probs[j]` over `ids[j]`.

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
        q: For each row the distributions that its guesses were sampled from at random, each from the distribution of
            the node before; None for a row whose guesses were chosen (argmax, top-k, n-gram, ...). None instead of a
            tuple where every row's guesses were chosen. The nodes that have distributions, from node 0 on, are a chain,
            and how many they are must not depend on what was sampled. Nodes behind them were chosen; they may follow
            any node and depend on all.
        expected: For each row the number of guesses that the drafter's probabilities let expect to be accepted; None
            where that was not computed.
        chances: For each row the chance of each guess to be accepted with all before it on its path, in the order of
            the nodes, without those that fill up; None where that was not computed.
    """

    tokens: Tensor
    parents: Tensor
    q: tuple[SparseDistribution | None, ...] | None = None
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


@dataclass(frozen=True)
class Plan:
    """How far to draft in one cycle, and in which way.

    Attributes:
        block_size: Most tokens on a path, anchor included; a drafter may return fewer.
        params: Of each row; a guess is best chosen or sampled under the distribution that the target will follow.
        tree_budget: Most guesses of each row's tree; 0 asks for chains. A drafter that has no trees returns chains.
        cycle_seconds: Time of a whole cycle with 0, 1, 2, ... guesses a row. With it only as many guesses are worth
            returning as maximise the expected tokens over this time; None asks for as many as the rest allows.
        trust: Accepted guesses over those that the drafter expected, as far as is known; with `cycle_seconds`, expected
            acceptance is multiplied by it.
        draws: `[B, block_size - 1]` float64 in [0, 1): asks for a chain of guesses sampled with these numbers, one a
            depth, whatever the tree budget. None asks for chosen guesses. A drafter that cannot draw ignores them and
            returns q None.
        draft_window, draft_passes: As in `Drafting`.
    """

    block_size: int
    params: Sequence[SamplingParams]
    tree_budget: int = 0
    cycle_seconds: Sequence[float] | None = None
    trust: float = 1.0
    draws: Tensor | None = None
    draft_window: int | None = None
    draft_passes: int | None = None


SPARSE_SIZE = 64  # most probable tokens among which a guess is sampled


def sparsify(probs: Tensor) -> SparseDistribution:
    """Distributions `[..., V]` cut to their `SPARSE_SIZE` most probable tokens, `[..., K]`."""
    top = probs.topk(min(SPARSE_SIZE, probs.size(-1)), dim=-1)
    return SparseDistribution(top.indices, top.values / top.values.sum(dim=-1, keepdim=True))


def chain_q(
    q_BDK: SparseDistribution, count: int, params: Sequence[SamplingParams]
) -> tuple[SparseDistribution | None, ...]:
    """q of chains of `count` guesses that were sampled from one distribution a depth.

    Args:
        q_BDK: `[B, D, K]`, D at least `count`.
        params: Of each row; one at temperature 0 draws nothing and has no distributions.
    """
    # Node j's distribution draws node j + 1. The last node draws none, so any distribution will do.
    nodes = [min(node, q_BDK.ids.size(1) - 1) for node in range(1 + count)]
    return tuple(
        SparseDistribution(q_BDK.ids[row, nodes], q_BDK.probs[row, nodes]) if p.temperature > 0 else None
        for row, p in enumerate(params)
    )


def cut(proposal: Proposal, bounds: Sequence[RequestDrafting | None]) -> Proposal:
    """The proposal with as many guesses as the request of each row allows; None allows all.

    What is cut depends on the shape of a tree and never on its tokens, and sampled guesses come first, so they keep
    their distributions.
    """
    rows = [
        _kept(parents, depths, bound)
        for parents, depths, bound in zip(proposal.parent_lists, proposal.depth_lists, bounds, strict=True)
    ]
    count = max(map(len, rows))
    parents = []
    for kept, before in zip(rows, proposal.parent_lists, strict=True):
        places = {node: place for place, node in enumerate(kept)} | {-1: -1}
        parents.append([*(places[before[node]] for node in kept), *[-1] * (count - len(kept))])
    index = torch.tensor([[*kept, *[0] * (count - len(kept))] for kept in rows])
    q = None
    if proposal.q is not None:  # of sampled chains the first nodes stay; one without guesses has no distribution
        q = tuple(dist and _cut_q(dist, kept) for dist, kept in zip(proposal.q, rows, strict=True))
    tokens = proposal.tokens.gather(1, send(index, proposal.tokens.device))
    return Proposal(tokens, torch.tensor(parents), q if q and any(q) else None, proposal.expected)


def _cut_q(dist: SparseDistribution, kept: Sequence[int]) -> SparseDistribution | None:
    count = sum(node < len(dist.ids) for node in kept)
    return SparseDistribution(dist.ids[:count], dist.probs[:count]) if count > 1 else None


def _kept(parents: Sequence[int], depths: Sequence[int], bound: RequestDrafting | None) -> list[int]:
    """The nodes of a row that stay, in order; with each its ancestors."""
    nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
    if bound is None:
        return nodes
    if not bound.enabled:
        return nodes[:1]
    if bound.block_size is not None:
        nodes = [node for node in nodes if depths[node] < bound.block_size]
    if bound.tree_budget == 0:  # the path of first children, which are the likeliest
        path = [0]
        for node in nodes[1:]:
            if parents[node] == path[-1]:
                path.append(node)
        return path
    return nodes if bound.tree_budget is None else nodes[: 1 + bound.tree_budget]
