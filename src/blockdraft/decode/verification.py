"""Verification: which draft tokens are accepted, as a pure function of proposal, distributions and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from blockdraft.decode.block_verification import judge_chains
from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import Proposal


class Verdict(NamedTuple):
    """Outcome of a verification.

    Attributes:
        path: For each sequence the accepted nodes from the anchor, node 0, on; empty where the walk reached a node
            without a distribution.
        bonus: For each sequence the target's token after the path, which becomes the next anchor; -1 where the path is
            empty.
    """

    path: list[list[int]]
    bonus: list[int]


def verify(
    proposal: Proposal, distributions: Distributions, uniforms_BN: Tensor | None, tests_BN: Tensor | None = None
) -> Verdict:
    """Accept draft tokens so that the output has the target's distribution.

    - Chosen draft tokens (`q` None): after each node a token is sampled from the target's p. The walk descends while a
      child holds it. So every output token is sampled from p, and a draft token x is accepted with probability p(x).
      At temperature 0 this accepts the longest path of argmax tokens (DFlash, arXiv 2602.06036; for trees DDTree, arXiv
      2604.12989).
    - Sampled draft tokens, always a chain: block verification (`accept_block`), which accepts at least as many in
      expectation as testing token by token. The token after the accepted part is then decided. If a chosen draft token
      beside the chain holds it, the walk goes on from there as above, so these may depend on the chain.

    A sequence whose walk reaches a node without a distribution gets an empty path and the bonus -1. Such nodes are
    ignored where no walk reaches them, and never affect other sequences. A sampled chain ends with such a node.

    Args:
        proposal: Trees of B sequences and N nodes.
        distributions: p after each of these nodes.
        uniforms_BN: A number in [0, 1) for each node, float64, for the token after it. Nodes of one depth may share a
            number, since a path holds one of them at most. None if every sequence is greedy.
        tests_BN: A number in [0, 1) for each node, float64, for its acceptance; independent of all other numbers, those
            that the draft tokens were sampled with included. None if there are no sampled draft tokens.
    """
    if distributions.argmax is not None and proposal.q is None:
        return _follow(proposal.parent_lists, distributions.tokens, distributions.argmax)
    tokens = distributions.tokens
    children = [children_of(parents) for parents in proposal.parent_lists]
    q = proposal.q or (None,) * len(tokens)
    sampled = [row for row in range(len(tokens)) if q[row] is not None and distributions.exists(row, 0)]
    paths: list[list[int]] = [[0] if q[row] is None else [] for row in range(len(tokens))]
    bonus = [-1] * len(tokens)
    if sampled:
        assert uniforms_BN is not None and tests_BN is not None, "sampled draft tokens need numbers"
        judged = judge_chains(sampled, proposal, children, distributions, uniforms_BN, tests_BN)
        for row, path, token in zip(sampled, *judged, strict=True):
            paths[row], bonus[row] = path, token

    def goes_on(row: int) -> bool:
        """Descend to the child that holds the token after the path, and return whether there is one.

        Sampled chains stop before a node without a distribution, which the next step handles.
        """
        following = children[row].get(paths[row][-1], ())
        matching = [child for child in following if tokens[row][child] == bonus[row]]
        if not matching or (q[row] is not None and not distributions.exists(row, matching[0])):
            return False
        paths[row].append(matching[0])
        return True

    # All sequences walk together, level by level.
    walking = [row for row in range(len(tokens)) if q[row] is None or (paths[row] and goes_on(row))]
    while walking:
        for row in [row for row in walking if not distributions.exists(row, paths[row][-1])]:
            paths[row], bonus[row] = [], -1
        walking = [row for row in walking if paths[row]]
        nodes = [paths[row][-1] for row in walking]
        for row, token in zip(walking, distributions.draw(walking, nodes, uniforms_BN), strict=True):
            bonus[row] = token
        walking = [row for row in walking if goes_on(row)]
    return Verdict(paths, bonus)


def _follow(parents: list[list[int]], tokens: list[list[int]], argmax: list[list[int]]) -> Verdict:
    """Return the verdict if the token after each node is known; -1 means no distribution."""
    paths, bonus = [], []
    for above, own, following in zip(parents, tokens, argmax, strict=True):
        # In reverse order, so that of two children with the same token the first is taken.
        children = {(above[node], own[node]): node for node in range(len(own) - 1, 0, -1)}
        path, node = [0], children.get((0, following[0]))
        while node is not None:
            path.append(node)
            node = children.get((node, following[node]))
        paths.append(path if following[path[-1]] >= 0 else [])
        bonus.append(following[path[-1]])
    return Verdict(paths, bonus)


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node that has any, padding excluded."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
    return children
