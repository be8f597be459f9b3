"""Proposals that are cut to what their requests allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockdraft.machine import send
from blockdraft.proposal.proposal import Proposal, SparseLaw
from blockdraft.types import RequestDrafting


def cut(proposal: Proposal, bounds: Sequence[RequestDrafting | None]) -> Proposal:
    """The proposal with as many guesses as the request of each row allows; None allows all.

    What is cut depends on the shape of a tree and never on its tokens, and drawn guesses come first, so they keep their
    laws.
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
    if proposal.q is not None:  # of drawn chains the first nodes stay; one without guesses has no law
        q = tuple(law and _cut_law(law, kept) for law, kept in zip(proposal.q, rows, strict=True))
    tokens = proposal.tokens.gather(1, send(index, proposal.tokens.device))
    return Proposal(tokens, torch.tensor(parents), q if q and any(q) else None, proposal.expected)


def _cut_law(law: SparseLaw, kept: Sequence[int]) -> SparseLaw | None:
    count = sum(node < len(law.ids) for node in kept)
    return SparseLaw(law.ids[:count], law.probs[:count]) if count > 1 else None


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
