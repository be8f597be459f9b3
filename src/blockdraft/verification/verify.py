"""Verification: a pure function of the proposal, the target's probabilities and random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blockdraft.proposal import Proposal
from blockdraft.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    path: For each row the accepted nodes from the anchor on, so it always begins with 0.
    bonus: For each row the token drawn at the end of the path, which becomes the next anchor.
    """

    path: list[list[int]]
    bonus: list[int]


def verify(proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor) -> Verdict:
    """Accept the guesses that the target draws itself.

    Guesses that were chosen, not drawn: at each node the target draws from its own p, and the walk descends while a
    child holds the drawn token. Every token that comes out is the target's own draw, so the output has law p whatever
    was guessed; a guess x is accepted with probability p(x). At temperature 0, p is one-hot and the walk accepts the
    longest prefix that equals the argmax (DFlash, arXiv 2602.06036; DDTree, arXiv 2604.12989, for trees).

    Args:
        proposal: The tree of B rows and N nodes, with `q` None.
        probs_BNV: p after each node, `[B, N, V]`.
        uniforms_BN: A number in [0, 1) for each node, float64. Nodes of one depth may share a number, because a walk
            visits one node of each depth.

    Raises:
        NotImplementedError: The guesses were drawn at random (`q` is set), which needs rejection against q.
    """
    if proposal.q is not None and any(law is not None for law in proposal.q):
        raise NotImplementedError("This proposal has drawn guesses (q is set); only chosen guesses can be verified.")
    drawn = draw(probs_BNV, uniforms_BN).tolist()
    tokens, parents = proposal.tokens.tolist(), proposal.parents.tolist()
    paths, bonuses = [], []
    for row in range(len(tokens)):
        children = {(parents[row][i], tokens[row][i]): i for i in reversed(range(1, len(tokens[row])))}
        path = [0]
        while (child := children.get((path[-1], drawn[row][path[-1]]))) is not None:
            path.append(child)
        paths.append(path)
        bonuses.append(drawn[row][path[-1]])
    return Verdict(paths, bonuses)
