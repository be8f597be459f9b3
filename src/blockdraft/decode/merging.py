"""Merges draft tokens from several sources, which do not know of each other, into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution
from blockdraft.decode.tree import best_count

ASSUMED = 0.5  # acceptance probability, given its parent's, of a draft token whose drafter states none


def merged(anchor: Tensor, proposals: Sequence[Proposal], plan: Plan) -> Proposal:
    """Return the tree of the draft tokens that are most likely to be accepted, from any of the proposals.

    Args:
        anchor: `[B]` int64.
        proposals: Trees of chosen draft tokens behind these anchors.
        plan: Gives the tree budget, and the step times that decide how many draft tokens pay.
    """
    texts = [proposal.tokens.tolist() for proposal in proposals]
    rows = [
        _likeliest(
            [
                (tokens[row], proposal.parent_lists[row], _acceptance_probs(proposal, row))
                for tokens, proposal in zip(texts, proposals, strict=True)
            ],
            plan.tree_budget,
        )
        for row in range(len(anchor))
    ]
    count, expected = plan.tree_budget, None
    if plan.step_seconds is not None:
        acceptance_probs = [[acceptance_prob for acceptance_prob, _, _ in nodes] for nodes in rows]
        count = best_count(acceptance_probs, plan.step_seconds, plan.calibration)
        expected = tuple(sum(row[:count]) for row in acceptance_probs)
    tokens = [[0, *(token for _, _, token in nodes[:count])] for nodes in rows]
    parents = [[-1, *(parent for _, parent, _ in nodes[:count])] for nodes in rows]
    return Proposal(*filled(anchor, tokens, parents), expected=expected)


def beside(anchor: Tensor, sampled: Proposal, others: Sequence[Proposal], budget: int) -> Proposal:
    """Return the tree of a whole sampled chain, and of as many likely draft tokens of the others as the budget leaves.

    Nodes beside the chain may depend on what was sampled. The chain's length must not.

    Args:
        anchor: `[B]` int64.
        sampled: The sampled chain.
        others: As `proposals` of `merged`.
        budget: Most draft tokens per sequence.
    """
    chains, texts = sampled.tokens.tolist(), [proposal.tokens.tolist() for proposal in others]
    rows, above, dists = list[list[int]](), list[list[int]](), list[SparseDistribution | None]()
    for row in range(len(anchor)):
        parents = [parent for node, parent in enumerate(sampled.parent_lists[row]) if node == 0 or parent >= 0]
        tokens, dist = chains[row][: len(parents)], None if sampled.q is None else sampled.q[row]
        dists.append(dist and SparseDistribution(dist.ids[: len(parents)], dist.probs[: len(parents)]))
        nodes = {(parents[node], tokens[node]): node for node in range(1, len(parents))}
        trees = [
            (said[row], proposal.parent_lists[row], _acceptance_probs(proposal, row))
            for said, proposal in zip(texts, others, strict=True)
        ]
        places = [0]  # indices of the others' nodes in this tree
        for _, parent, token in _likeliest(trees, budget):
            at = places[parent], token
            if at not in nodes:
                if len(tokens) > budget:
                    break
                nodes[at] = len(tokens)
                tokens.append(token)
                parents.append(at[0])
            places.append(nodes[at])
        rows.append(tokens)
        above.append(parents)
    return Proposal(*filled(anchor, rows, above), tuple(dists))


def put_first(own: Sequence[list[int]], proposal: Proposal, budget: int) -> Proposal:
    """Put chains of draft tokens before those of a proposal.

    A chain plan keeps what the proposal adds behind the same draft tokens. A tree keeps all its nodes that the budget
    holds. Draft tokens that were sampled are dropped, whatever they are, where a sequence has such a chain.

    Args:
        own: Draft tokens of each sequence, without the anchor; may be empty.
        budget: Most draft tokens of a tree; 0 for chains.
    """
    rows, above = list[list[int]](), list[list[int]]()
    q = list(proposal.q or [None] * len(own))
    for row, (first, tokens) in enumerate(zip(own, proposal.tokens.tolist(), strict=True)):
        count = 1 + sum(parent >= 0 for parent in proposal.parent_lists[row])
        merged, parents = [tokens[0], *first], list(range(-1, len(first)))
        if not first:
            merged, parents, count = tokens[:count], proposal.parent_lists[row][:count], 0
        elif q[row] is not None:
            q[row], count = None, 0
        nodes, places = {(node, token): node + 1 for node, token in enumerate(first)}, [0]
        for token, parent in zip(tokens[1:count], proposal.parent_lists[row][1:count], strict=True):
            at = places[parent], token
            if at not in nodes:
                if len(merged) > budget if budget else at[0] != len(merged) - 1:
                    break
                nodes[at] = len(merged)
                merged.append(token)
                parents.append(at[0])
            places.append(nodes[at])
        rows.append(merged)
        above.append(parents)
    known = tuple(q) if any(dist is not None for dist in q) else None
    return Proposal(*filled(proposal.tokens[:, 0], rows, above), known, part=proposal.part)


def _acceptance_probs(proposal: Proposal, row: int) -> Sequence[float]:
    if proposal.acceptance_probs is not None:
        return proposal.acceptance_probs[row]
    found = [1.0]
    for parent in proposal.parent_lists[row][1:]:
        if parent >= 0:  # else padding
            found.append(ASSUMED * found[parent])
    return found[1:]


def _likeliest(
    trees: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], budget: int
) -> list[tuple[float, int, int]]:
    """Return nodes `(acceptance_prob, parent, token)` behind the anchor, best first and parents before children.

    Args:
        trees: Tokens, parents and acceptance probabilities of several trees of one sequence; the probabilities begin
            with the first draft token.
        budget: Most nodes.
    """
    # children[node][token] is the index of a child, and the chance that it is accepted if its parent is.
    children: list[dict[int, tuple[int, float]]] = [{}]
    for tokens, parents, from_draft in trees:
        places, acceptance_probs = [0], [1.0, *from_draft]
        for node in range(1, len(acceptance_probs)):
            before = parents[node]
            siblings, token = children[places[before]], tokens[node]
            if token not in siblings:
                siblings[token] = len(children), 0.0
                children.append({})
            place, known = siblings[token]
            share = acceptance_probs[node] / acceptance_probs[before] if acceptance_probs[before] > 0 else 0.0
            siblings[token] = place, max(known, share)
            places.append(place)
    nodes = list[tuple[float, int, int]]()
    heap = [(-share, place, 0, token) for token, (place, share) in children[0].items()]
    heapify(heap)
    while heap and len(nodes) < budget:
        cost, place, parent, token = heappop(heap)
        nodes.append((-cost, parent, token))
        for following, (child, share) in children[place].items():
            heappush(heap, (cost * share, child, len(nodes), following))
    return nodes


def filled(anchor: Tensor, tokens: list[list[int]], parents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the tokens, on the anchor's device, and parents of all sequences, padded to one length."""
    count = max(map(len, tokens))
    filled = torch.tensor([[*row, *[0] * (count - len(row))] for row in tokens]).to(anchor.device)
    filled[:, 0] = anchor
    return filled, torch.tensor([[*row, *[-1] * (count - len(row))] for row in parents])
