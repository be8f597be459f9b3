"""The plan of a step, which a drafter gets, and its proposal: a tree of draft tokens rooted at the anchor.

A chain is a tree of width one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.machine import send
from blockdraft.types import RequestDrafting, SamplingParams


@dataclass(frozen=True)
class Plan:
    """How far to draft in one step: a `ChainPlan`, `TreePlan`, `SampledPlan` or `HybridPlan`.

    Attributes:
        block_size: Most tokens on a path, anchor included. A drafter may return fewer.
        params: Sampling parameters of each sequence. A draft token is best chosen or sampled from the distribution that
            these make of its logits.
        tree_budget: Most draft tokens of a tree; 0 for a chain. Drafters without trees return chains.
        step_seconds: Seconds of a whole step with 0, 1, 2, ... draft tokens per sequence. The drafter then returns as
            many as maximize the expected tokens per second; None asks for as many as the other limits allow.
        calibration: Accepted draft tokens over those that the drafter expected, so far. With `step_seconds` it scales
            the expected acceptance.
        draft_window, draft_passes: As in `Drafting`.
    """

    block_size: int
    params: Sequence[SamplingParams]
    _: KW_ONLY
    step_seconds: Sequence[float] | None = None
    calibration: float = 1.0
    draft_window: int | None = None
    draft_passes: int | None = None
    tree_budget = 0  # a class attribute, overridden by a field where there may be a tree

    def as_tree(self, budget: int) -> Plan:
        """Return this plan for a tree, or for a chain if the budget is 0."""
        if budget == 0:
            return ChainPlan(self.block_size, self.params, **self._options())
        return TreePlan(self.block_size, self.params, budget, **self._options())

    def as_sampled(self, uniforms: Tensor) -> SampledPlan:
        """Return this plan for a sampled chain."""
        return SampledPlan(self.block_size, self.params, uniforms, self.tree_budget, **self._options())

    def _options(self) -> dict[str, Any]:
        names = ("step_seconds", "calibration", "draft_window", "draft_passes")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ChainPlan(Plan):
    """Asks for a chain of chosen draft tokens."""


@dataclass(frozen=True)
class TreePlan(Plan):
    """Asks for a tree of chosen draft tokens."""

    tree_budget: int


@dataclass(frozen=True)
class SampledPlan(Plan):
    """Asks for a chain of sampled draft tokens. A drafter that cannot sample returns chosen ones, without q.

    Attributes:
        uniforms: `[B, block_size - 1]` float64 in [0, 1), one per depth, to sample with.
        tree_budget: Most draft tokens of a hybrid drafter's tree around the chain; 0 for the chain alone.
    """

    uniforms: Tensor
    tree_budget: int = 0

    def as_chosen(self) -> Plan:
        """Return this plan with chosen draft tokens."""
        return self.as_tree(self.tree_budget)


class DraftTurn(NamedTuple):
    """A member of a hybrid drafter that may draft in a step, by index, and the tokens per second of its steps."""

    drafter: int
    plan: Plan
    tokens_per_second: float


@dataclass(frozen=True)
class HybridPlan(Plan):
    """Asks the members of a hybrid drafter in turn, until one promises more tokens per second than those behind it."""

    turns: Sequence[DraftTurn]


@dataclass(frozen=True)
class SparseDistribution:
    """Distributions over a few tokens each: a sequence's child of node j was sampled from `probs[j]` over `ids[j]`.

    Attributes:
        ids: `[M, K]` int64, distinct tokens after the first M nodes, the last of which has no sampled child. Before
            there is a proposal `[..., K]`, for several sequences or depths.
        probs: Float32 probabilities of the same shape, summing to 1 over K; all other tokens have probability 0.
    """

    ids: Tensor
    probs: Tensor


@dataclass(eq=False)  # not frozen, which would double the time of making one
class Proposal:
    """Draft tokens of one step.

    Attributes:
        tokens: `[B, N]` int64; node 0 is the anchor, the last committed token, not yet in the target's cache.
        parents: `[B, N]` int64, always on the CPU, so that reading the tree's shape never waits for a GPU.
            `parents[b, i] < i` for i > 0, and -1 for node 0. Shorter sequences are padded at the end with nodes whose
            parent is -1 too; these are never accepted.
        q: For each sequence the distributions that its draft tokens were sampled from; None where they were chosen
            (argmax, top-k, n-gram, ...), and None instead of a tuple if all were. The nodes with distributions, from
            node 0 on, form a chain, whose length must not depend on what was sampled. Nodes behind them were chosen;
            they may follow any node and depend on all.
        expected: For each sequence the expected number of accepted draft tokens by the drafter's probabilities; None if
            unknown.
        acceptance_probs: For each sequence and draft token the probability that it is accepted together with all before
            it on its path, in the order of the nodes, without padding; None if unknown.
        part: Index of the member that drafted, for a `HybridPlan`.
        catch_up_seconds: Time that members spent on tokens that others had drafted, for a `HybridPlan`.
        parent_lists: `parents` as lists.
        depth_lists: For each sequence the distance of each node from the anchor; 0 for padding.
    """

    tokens: Tensor
    parents: Tensor
    q: tuple[SparseDistribution | None, ...] | None = None
    expected: tuple[float, ...] | None = None
    acceptance_probs: tuple[tuple[float, ...], ...] | None = None
    part: int = 0
    catch_up_seconds: float = 0.0
    parent_lists: list[list[int]] = field(init=False)
    depth_lists: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.parents.shape and self.tokens.ndim == 2
        assert self.tokens.dtype == self.parents.dtype == torch.int64
        assert self.parents.device.type == "cpu"
        self.parent_lists = self.parents.tolist()
        self.depth_lists = _depth_lists(self.parent_lists)


def chain(tokens_BN: Tensor) -> Proposal:
    """Return a proposal of one chain per sequence; `tokens_BN[:, 0]` is the anchor."""
    return Proposal(tokens_BN, chain_parents(*tokens_BN.shape))


@lru_cache(maxsize=256)
def chain_parents(batch: int, count: int) -> Tensor:
    """Return the parents `[B, N]` of chains. The tensor is shared: do not write to it."""
    return torch.arange(-1, count - 1).repeat(batch, 1)


def is_chain(parents_BN: Tensor) -> bool:
    return torch.equal(parents_BN, chain_parents(*parents_BN.shape))


def depths(parents_BN: Tensor) -> Tensor:
    """Return the distance of each node from the anchor, `[B, N]` int64 on the CPU; 0 for padding."""
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
    """Return the attention mask inside a proposal, `[B, N, N]` bool on the CPU.

    `[b, i, j]` is True where node i attends to node j, that is, where j is i or one of its ancestors.
    """
    batch, count = parents_BN.shape
    if is_chain(parents_BN):
        return torch.ones(count, count, dtype=torch.bool).tril().expand(batch, count, count)
    # Each line of the mask is one integer with a bit per node: a few integer operations are faster than tensors.
    size = (count + 7) // 8
    data = bytearray()
    for parents in parents_BN.tolist():
        masks = list[int]()
        for node, parent in enumerate(parents):
            masks.append(1 << node | (0 if parent < 0 else masks[parent]))
            data += masks[-1].to_bytes(size, "little")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return torch.from_numpy(bits.reshape(batch, count, -1)[:, :, :count].view(bool))


SPARSE_SIZE = 64  # a draft token is sampled from so many of the most probable tokens


def sparsify(probs: Tensor) -> SparseDistribution:
    """Cut distributions `[..., V]` to their `SPARSE_SIZE` most probable tokens and normalize them, `[..., K]`."""
    top = probs.topk(min(SPARSE_SIZE, probs.size(-1)), dim=-1)
    return SparseDistribution(top.indices, top.values / top.values.sum(dim=-1, keepdim=True))


def chain_q(
    q_BDK: SparseDistribution, count: int, params: Sequence[SamplingParams]
) -> tuple[SparseDistribution | None, ...] | None:
    """Return the q of chains whose `count` draft tokens were sampled from one distribution per depth.

    Args:
        q_BDK: `[B, D, K]`, D at least `count`.
        params: Sampling parameters of each sequence. At temperature 0 there is no q: the draft tokens are chosen.
    """
    if all(p.temperature == 0 for p in params):
        return None
    # Node j + 1 is sampled from the distribution of node j. For the last node, which has no child, any will do.
    nodes = [min(node, q_BDK.ids.size(1) - 1) for node in range(1 + count)]
    return tuple(
        SparseDistribution(q_BDK.ids[i, nodes], q_BDK.probs[i, nodes]) if p.temperature > 0 else None
        for i, p in enumerate(params)
    )


def cut(proposal: Proposal, limits: Sequence[RequestDrafting | None]) -> Proposal:
    """Remove the draft tokens beyond the limits of each sequence; None limits nothing.

    What is cut depends on the shape of the tree alone, not on its tokens, so sampled draft tokens keep their
    distributions.
    """
    rows = [
        _kept(parents, depths, limit)
        for parents, depths, limit in zip(proposal.parent_lists, proposal.depth_lists, limits, strict=True)
    ]
    count = max(map(len, rows))
    parents = []
    for kept, before in zip(rows, proposal.parent_lists, strict=True):
        places = {node: place for place, node in enumerate(kept)} | {-1: -1}
        parents.append([*(places[before[node]] for node in kept), *[-1] * (count - len(kept))])
    index = torch.tensor([[*kept, *[0] * (count - len(kept))] for kept in rows])
    q = None
    if proposal.q is not None:  # sampled nodes come first; where none is left, there is no q
        q = tuple(dist and _cut_q(dist, kept) for dist, kept in zip(proposal.q, rows, strict=True))
    tokens = proposal.tokens.gather(1, send(index, proposal.tokens.device))
    return replace(
        proposal,
        tokens=tokens,
        parents=torch.tensor(parents),
        q=q if q and any(q) else None,
        acceptance_probs=None,
    )


def _cut_q(dist: SparseDistribution, kept: Sequence[int]) -> SparseDistribution | None:
    count = sum(node < len(dist.ids) for node in kept)
    return SparseDistribution(dist.ids[:count], dist.probs[:count]) if count > 1 else None


def _kept(parents: Sequence[int], depths: Sequence[int], limit: RequestDrafting | None) -> list[int]:
    """Return the nodes of a sequence that stay, in order, each with its ancestors."""
    nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
    if limit is None:
        return nodes
    if not limit.enabled:
        return nodes[:1]
    if limit.block_size is not None:
        nodes = [node for node in nodes if depths[node] < limit.block_size]
    if limit.tree_budget == 0:  # first children are the likeliest
        path = [0]
        for node in nodes[1:]:
            if parents[node] == path[-1]:
                path.append(node)
        return path
    return nodes if limit.tree_budget is None else nodes[: 1 + limit.tree_budget]
