"""Draft trees of the tokens that are most likely to be accepted, and how many of them pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappush, heapreplace
from math import exp, inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockdraft.decode.proposal import Proposal
from blockdraft.decode.step_time import best_count
from blockdraft.machine import send

FIRST_SIZE = 32  # draft tokens of the first tree that is grown if the number that pays is unknown
GROWTH = 4  # ratio of the next tree's size, if nearly all draft tokens of one pay
NEARLY_ALL = 0.75  # of the draft tokens


def best_first(
    anchor_B: Tensor,
    log_probs_BDK: Tensor,
    ids_BDK: Tensor,
    budget: int,
    step_seconds: Sequence[float] | None = None,
    calibration: float = 1.0,
) -> Proposal:
    """Return the tree with the largest expected accepted length (DDTree, arXiv 2604.12989).

    The distribution of a draft token does not depend on those before it. So a node is accepted with the product of the
    probabilities on its path, and the expected length of a tree is the sum of these over its nodes. Nodes are added
    best first. No path is likelier than its prefixes, so the first n nodes are the best tree of n nodes. With K = 1 the
    tree is a chain.

    Args:
        anchor_B: `[B]` int64.
        log_probs_BDK: The K best log probabilities at each of D depths, descending, float; -inf is no candidate. A
            node is added after its better siblings, so more than K = `budget` are useless.
        ids_BDK: Their tokens, int64, distinct at each depth.
        budget: Most draft tokens per sequence.
        step_seconds, calibration: As in `Plan`. If given, all trees are cut to the number of draft tokens that pays
            best.

    Returns:
        A proposal of at most 1 + budget nodes per sequence, in the order in which they were added, padded.
    """
    # One more rank and one more depth, both of probability 0, save the loop its bounds checks.
    ranks = log_probs_BDK.size(2) + 1
    flat = pad(log_probs_BDK, (0, 1, 0, 1), value=-inf).flatten(1).tolist()
    rows = [_grow(log_probs, ranks, budget) for log_probs in flat]
    return _proposal(anchor_B, rows, pad(ids_BDK, (0, 1, 0, 1)).flatten(1), step_seconds, calibration)


def lattice_tree(
    anchor_B: Tensor,
    log_probs_BDKK: Tensor,
    ids_BDK: Tensor,
    budget: int,
    step_seconds: Sequence[float] | None = None,
    calibration: float = 1.0,
) -> Proposal:
    """Return the `best_first` tree for draft tokens whose distribution depends on the one before.

    The children of a node are scored given the node's own token.

    Args:
        anchor_B: `[B]` int64.
        log_probs_BDKK: `[b, d, p, k]` is the log probability of candidate k at depth d after candidate p of the depth
            before; at the first depth, where all follow the anchor, the same for every p. -inf is no candidate.
        ids_BDK: The candidates, int64, distinct at each depth.
        budget, step_seconds, calibration: As for `best_first`.
    """
    depth, count = ids_BDK.shape[1:]
    ranks = count + 1
    log_probs, order = log_probs_BDKK.sort(dim=-1, descending=True)
    # The children of candidate k are listed as those after p = k at the next depth.
    next_depth = torch.arange(1, depth + 1, device=order.device)[:, None, None] * count
    over = (0, 1, 0, 0, 0, 1)  # as in `best_first`
    flat = pad(log_probs, over, value=-inf).flatten(1).tolist()
    children = pad((next_depth + order) * ranks, over).flatten(1).tolist()
    tokens_BG = pad(ids_BDK.unsqueeze(2).expand_as(order).gather(3, order), over).flatten(1)

    def build(size: int) -> Proposal:
        rows = [_grow(row, ranks, size, following) for row, following in zip(flat, children, strict=True)]
        return _proposal(anchor_B, rows, tokens_BG, step_seconds, calibration)

    return build(budget) if step_seconds is None else _paying(build, budget)


def best_of(
    anchor_B: Tensor,
    log_probs_BG: Tensor,
    parents_BG: Tensor,
    tokens_BG: Tensor,
    budget: int,
    step_seconds: Sequence[float] | None = None,
    calibration: float = 1.0,
) -> Proposal:
    """Return the best draft tokens of a tree that was grown level by level (EAGLE-2, arXiv 2406.16858).

    Args:
        anchor_B: `[B]` int64.
        log_probs_BG: Float, of each draft token's whole path, so that none is likelier than its parent; -inf is none.
        parents_BG: Int64, index of the draft token before, always smaller; -1 for those that follow the anchor.
        tokens_BG: Int64.
        budget, step_seconds, calibration: As for `best_first`.
    """
    best, order = log_probs_BG.where(~log_probs_BG.isnan(), -inf).sort(dim=-1, descending=True, stable=True)
    if step_seconds is not None:  # so that no more nodes are built than are kept
        budget = best_count(best[:, :budget].exp().tolist(), step_seconds, calibration)
    rows = []
    for log_probs, draft_tokens, parents in zip(
        best[:, :budget].tolist(), order[:, :budget].tolist(), parents_BG.tolist(), strict=True
    ):
        places, nodes = {-1: 0}, list[tuple[float, int, int]]()
        for log_prob, draft_token in zip(log_probs, draft_tokens, strict=True):
            if log_prob == -inf:
                break
            nodes.append((-log_prob, places[parents[draft_token]], draft_token))
            places[draft_token] = len(nodes)
        rows.append(nodes)
    return _proposal(anchor_B, rows, tokens_BG, step_seconds, calibration)


def _proposal(
    anchor_B: Tensor,
    rows: Sequence[list[tuple[float, int, int]]],
    tokens_BG: Tensor,
    step_seconds: Sequence[float] | None,
    calibration: float,
) -> Proposal:
    """Return the proposal of nodes from `_grow`, cut to the number that pays best.

    Draft token g of a sequence is `tokens_BG[sequence, g]`.
    """
    count = max(len(nodes) for nodes in rows)
    expected = acceptance_probs = None
    if step_seconds is not None:
        path_probs = [[exp(-cost) for cost, _, _ in nodes] for nodes in rows]
        count = best_count(path_probs, step_seconds, calibration)
        acceptance_probs = tuple(tuple(probs[:count]) for probs in path_probs)
        expected = tuple(map(sum, acceptance_probs))
    filled = [[(0.0, -1, 0), *nodes[:count], *[(0.0, -1, 0)] * (count - len(nodes))] for nodes in rows]
    parents = torch.tensor([[parent for _, parent, _ in nodes] for nodes in filled])
    draft_tokens = send(
        torch.tensor([[draft_token for _, _, draft_token in nodes] for nodes in filled]), tokens_BG.device
    )
    tokens = tokens_BG.gather(1, draft_tokens)
    tokens[:, 0] = anchor_B
    return Proposal(tokens, parents, expected=expected, acceptance_probs=acceptance_probs)


def best_tree(
    anchor_B: Tensor,
    log_probs_BDV: Tensor,
    budget: int,
    step_seconds: Sequence[float] | None = None,
    calibration: float = 1.0,
) -> Proposal:
    """Return the `best_first` tree of distributions over the whole vocabulary.

    Args:
        log_probs_BDV: Log probabilities `[B, D, V]` of the draft tokens at each depth.
        budget, step_seconds, calibration: As for `best_first`.
    """

    def build(size: int) -> Proposal:
        best = log_probs_BDV.topk(min(size, log_probs_BDV.size(-1)), dim=-1)
        return best_first(anchor_B, best.values, best.indices, size, step_seconds, calibration)

    return build(budget) if step_seconds is None else _paying(build, budget)


def _paying(build: Callable[[int], Proposal], budget: int) -> Proposal:
    """Grow a small tree, and a larger one as long as nearly all draft tokens pay.

    Growing takes time too. Draft tokens are added best first, so if a quarter of them does not pay, more would pay only
    if they cost far less each.
    """
    size = min(FIRST_SIZE, budget)
    while True:
        proposal = build(size)
        if size == budget or proposal.tokens.size(1) - 1 < NEARLY_ALL * size:
            return proposal
        size = min(GROWTH * size, budget)


def _grow(
    log_probs: list[float], ranks: int, budget: int, children: Sequence[int] = ()
) -> list[tuple[float, int, int]]:
    """Return nodes `(cost, parent, draft_token)`, best first.

    The cost is minus the log probability of the path; parent and draft token are indices.

    Args:
        log_probs: Log probability of each draft token; index d * ranks + r has rank r at depth d + 1.
        children: Index of the best draft token after each one; by default that of the next depth.
    """
    nodes: list[tuple[float, int, int]] = []
    # Nodes that may be added next: the best sibling of each set that is not in the tree.
    heap = [(-log_probs[0], 0, 0)]
    while len(nodes) < budget and heap[0][0] < inf:
        cost, parent, draft_token = best = heap[0]
        nodes.append(best)
        heapreplace(heap, (cost + (log_probs[draft_token] - log_probs[draft_token + 1]), parent, draft_token + 1))
        child = children[draft_token] if children else (draft_token // ranks + 1) * ranks
        heappush(heap, (cost - log_probs[child], len(nodes), child))
    return nodes
