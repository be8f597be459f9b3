"""Merges draft tokens from several sources, which do not know of each other, into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution
from blockdraft.decode.step_time import best_count

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
        likeliest(
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
    trees, dists = list[_Tree](), list[SparseDistribution | None]()
    for row in range(len(anchor)):
        parents = [parent for node, parent in enumerate(sampled.parent_lists[row]) if node == 0 or parent >= 0]
        dist = None if sampled.q is None else sampled.q[row]
        dists.append(dist and SparseDistribution(dist.ids[: len(parents)], dist.probs[: len(parents)]))
        likely = likeliest(
            [
                (tokens[row], proposal.parent_lists[row], _acceptance_probs(proposal, row))
                for tokens, proposal in zip(texts, others, strict=True)
            ],
            budget,
        )
        trees.append(_Tree(chains[row][: len(parents)], parents))
        trees[row].add([token for _, _, token in likely], [parent for _, parent, _ in likely], budget)
    return Proposal(*filled(anchor, [tree.tokens for tree in trees], [tree.parents for tree in trees]), tuple(dists))


def put_first(own: Sequence[list[int]], proposal: Proposal, budget: int) -> Proposal:
    """Put chains of draft tokens before those of a proposal.

    Without a budget, what the proposal adds behind these chains is kept. With one, a tree keeps all its nodes that the
    budget holds. Draft tokens that were sampled are dropped, whatever they are, where a sequence has such a chain.

    Args:
        own: Draft tokens of each sequence, without the anchor; may be empty.
        budget: Most draft tokens of a tree, or 0.
    """
    trees, q = list[_Tree](), list(proposal.q or [None] * len(own))
    for row, (first, tokens) in enumerate(zip(own, proposal.tokens.tolist(), strict=True)):
        parents = proposal.parent_lists[row]
        count = 1 + sum(parent >= 0 for parent in parents)
        if not first:
            trees.append(_Tree(tokens[:count], parents[:count]))
            continue
        trees.append(_Tree([tokens[0], *first], list(range(-1, len(first)))))
        if q[row] is None:
            trees[row].add(tokens[1:count], parents[1:count], budget)
        q[row] = None
    known = tuple(q) if any(dist is not None for dist in q) else None
    tokens_and_parents = filled(
        proposal.tokens[:, 0], [tree.tokens for tree in trees], [tree.parents for tree in trees]
    )
    return Proposal(*tokens_and_parents, known, part=proposal.part)


class _Tree:
    """Tokens and parents of a tree of one sequence, to which nodes of others are added. Node 0 is the anchor."""

    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tokens, self.parents = tokens, parents
        self._nodes = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
        self._end = len(tokens) - 1

    def add(self, tokens: Sequence[int], parents: Sequence[int], budget: int) -> None:
        """Add the draft tokens of another tree with the same anchor.

        Args:
            tokens, parents: The draft tokens, without the anchor. Parents come before children.
            budget: Most draft tokens of this tree, which adds no more from the first on for which there is no place.
                With 0 this tree was a chain, and only grows behind its end.
        """
        own_nodes = [0]  # by node of the other tree; -1 for those that are left out
        for token, parent in zip(tokens, parents, strict=True):
            key = own_nodes[parent], token
            if key not in self._nodes:
                if budget and len(self.tokens) > budget:
                    return
                if not budget and key[0] < self._end:
                    own_nodes.append(-1)
                    continue
                self._nodes[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(key[0])
            own_nodes.append(self._nodes[key])


def _acceptance_probs(proposal: Proposal, row: int) -> Sequence[float]:
    if proposal.acceptance_probs is not None:
        return proposal.acceptance_probs[row]
    acceptance_probs = [1.0]
    for parent in proposal.parent_lists[row][1:]:
        if parent >= 0:  # else padding
            acceptance_probs.append(ASSUMED * acceptance_probs[parent])
    return acceptance_probs[1:]


def likeliest(
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
