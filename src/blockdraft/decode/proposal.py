"""The plan of a cycle, which a drafter gets, and its proposal: a tree of guessed tokens rooted at the anchor.

A chain is a tree of width one.
"""

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
    """Distributions over a few tokens each: the child of node j of a row was sampled from `probs[j]` over `ids[j]`.

    Attributes:
        ids: `[M, K]` int64, distinct tokens after the first M nodes, the last of which has no sampled child. Before
            there is a proposal `[..., K]`, for several rows or depths.
        probs: Probabilities of the same shape, float32, summing to 1 over K; all other tokens have probability 0.
    """

    ids: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Proposal:
    """Guesses of one cycle.

    Attributes:
        tokens: `[B, N]` int64; node 0 is the anchor, the last committed token, not yet in the target's cache.
        parents: `[B, N]` int64 on the CPU, whatever the device of the tokens: the host makes the tree, and reading its
            shape must not wait for a GPU. `parents[b, i] < i` for i > 0, and -1 for node 0. Rows with fewer guesses are
            padded at the end with nodes whose parent is -1 too; these are never accepted.
        q: For each row the distributions that its guesses were sampled from; None for a row whose guesses were chosen
            (argmax, top-k, n-gram, ...), and None instead of a tuple if all were. The nodes with distributions, from
            node 0 on, form a chain, whose length must not depend on what was sampled. Nodes after them were chosen;
            they may follow any node and depend on all.
        expected: For each row the expected number of accepted guesses by the drafter's probabilities; None if unknown.
        acceptance_probs: For each row and guess the probability that it is accepted together with all before it on its
            path, in the order of the nodes, without padding; None if unknown.
        part: Index of the drafter that drafted, of a combination whose plan has `turns`.
    """

    tokens: Tensor
    parents: Tensor
    q: tuple[SparseDistribution | None, ...] | None = None
    expected: tuple[float, ...] | None = None
    acceptance_probs: tuple[tuple[float, ...], ...] | None = None
    part: int = 0

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`parents` as lists of numbers."""
        return self.parents.tolist()

    @cached_property
    def depth_lists(self) -> list[list[int]]:
        """For each row the distance of each node from the anchor; 0 for padding."""
        return _depth_lists(self.parent_lists)

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.parents.shape and self.tokens.ndim == 2
        assert self.tokens.dtype == self.parents.dtype == torch.int64
        assert self.parents.device.type == "cpu"


def chain(tokens_BN: Tensor) -> Proposal:
    """The proposal of one chain a row; `tokens_BN[:, 0]` is the anchor."""
    return Proposal(tokens_BN, chain_parents(*tokens_BN.shape))


@lru_cache(maxsize=256)
def chain_parents(batch: int, count: int) -> Tensor:
    """Parents `[B, N]` of chains. The tensor is shared: do not write to it."""
    return torch.arange(-1, count - 1).expand(batch, count)


def is_chain(parents_BN: Tensor) -> bool:
    return torch.equal(parents_BN, chain_parents(*parents_BN.shape))


def depths(parents_BN: Tensor) -> Tensor:
    """Distance of each node from the anchor, `[B, N]` int64 on the CPU; 0 for padding."""
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
    """Attention mask inside a proposal, `[B, N, N]` bool on the CPU.

    `[b, i, j]` is True where node i attends to node j, that is, where j is i or one of its ancestors.
    """
    batch, count = parents_BN.shape
    if is_chain(parents_BN):
        return torch.ones(count, count, dtype=torch.bool).tril().expand(batch, count, count)
    # Each line of the mask is one integer with a bit for each node: some operations on integers take less time than one
    # on tensors.
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
    """Extent and shape of the proposals of one cycle.

    Attributes:
        block_size: Most tokens on a path, anchor included. A drafter may return fewer.
        params: Sampling parameters of each row. A guess is best chosen or sampled from the distribution that these
            make of its logits.
        tree_budget: Most guesses of each row's tree; 0 asks for chains. Drafters without trees return chains.
        cycle_seconds: Time of a whole cycle with 0, 1, 2, ... guesses a row. The drafter then returns as many guesses
            as maximise the expected tokens over this time; None asks for as many as the other limits allow.
        calibration: Ratio of accepted guesses to those that the drafter expected, so far. With `cycle_seconds` it
            scales the expected acceptance.
        draws: `[B, block_size - 1]` float64 in [0, 1): asks for a chain of guesses sampled with these numbers, one a
            depth, whatever the tree budget. None asks for chosen guesses. A drafter that cannot sample ignores it and
            returns a proposal without q.
        draft_window, draft_passes: As in `Drafting`.
        turns: For a combination: the drafters to ask in turn, by index, each with a plan of its own, until one promises
            more tokens a second than the `rate` of those that would be next. Empty to ask all at once.
        rate: Tokens a second that cycles of this plan are expected to yield.
    """

    block_size: int
    params: Sequence[SamplingParams]
    tree_budget: int = 0
    cycle_seconds: Sequence[float] | None = None
    calibration: float = 1.0
    draws: Tensor | None = None
    draft_window: int | None = None
    draft_passes: int | None = None
    turns: Sequence[tuple[int, Plan]] = ()
    rate: float = 0.0


SPARSE_SIZE = 64  # tokens that a guess is sampled from, the most probable ones


def sparsify(probs: Tensor) -> SparseDistribution:
    """Distributions `[..., V]` cut to their `SPARSE_SIZE` most probable tokens and normalised, `[..., K]`."""
    top = probs.topk(min(SPARSE_SIZE, probs.size(-1)), dim=-1)
    return SparseDistribution(top.indices, top.values / top.values.sum(dim=-1, keepdim=True))


def chain_q(
    q_BDK: SparseDistribution, count: int, params: Sequence[SamplingParams]
) -> tuple[SparseDistribution | None, ...]:
    """The q of a proposal of chains whose `count` guesses were sampled from one distribution a depth.

    Args:
        q_BDK: `[B, D, K]`, D at least `count`.
        params: Sampling parameters of each row. Rows at temperature 0 have no q, since their guesses are chosen.
    """
    # Node j + 1 is sampled from the distribution of node j. For the last node, which has no child, any will do.
    nodes = [min(node, q_BDK.ids.size(1) - 1) for node in range(1 + count)]
    return tuple(
        SparseDistribution(q_BDK.ids[row, nodes], q_BDK.probs[row, nodes]) if p.temperature > 0 else None
        for row, p in enumerate(params)
    )


def cut(proposal: Proposal, bounds: Sequence[RequestDrafting | None]) -> Proposal:
    """The proposal without guesses beyond the bounds of each row; None bounds nothing.

    Which guesses are cut depends on the shape of the tree alone, not on its tokens, so sampled guesses keep their
    distributions.
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
    if proposal.q is not None:  # sampled nodes come first; a row of which none is left has no q
        q = tuple(dist and _cut_q(dist, kept) for dist, kept in zip(proposal.q, rows, strict=True))
    tokens = proposal.tokens.gather(1, send(index, proposal.tokens.device))
    return Proposal(tokens, torch.tensor(parents), q if q and any(q) else None, proposal.expected, part=proposal.part)


def _cut_q(dist: SparseDistribution, kept: Sequence[int]) -> SparseDistribution | None:
    count = sum(node < len(dist.ids) for node in kept)
    return SparseDistribution(dist.ids[:count], dist.probs[:count]) if count > 1 else None


def _kept(parents: Sequence[int], depths: Sequence[int], bound: RequestDrafting | None) -> list[int]:
    """The nodes of a row that stay, in order, each with its ancestors."""
    nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
    if bound is None:
        return nodes
    if not bound.enabled:
        return nodes[:1]
    if bound.block_size is not None:
        nodes = [node for node in nodes if depths[node] < bound.block_size]
    if bound.tree_budget == 0:  # first children are the likeliest
        path = [0]
        for node in nodes[1:]:
            if parents[node] == path[-1]:
                path.append(node)
        return path
    return nodes if bound.tree_budget is None else nodes[: 1 + bound.tree_budget]
