"""Slow readable twins of the rules, as oracles: one row, plain Python numbers, the papers' own formulas.

Distributions are lists over the whole vocabulary: `p[node]` and `q[node]`. A rule returns the accepted nodes, anchor
first, and the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Distribution = Sequence[float]
Accepted = tuple[list[int], int]


def draw_token(dist: Distribution, uniform: float) -> int:
    """The first token at which the sum of the distribution exceeds `uniform` times its total."""
    total, reached = sum(dist), 0.0
    for token, share in enumerate(dist):
        reached += share
        if uniform * total < reached:
            return token
    return max(token for token, share in enumerate(dist) if share > 0)


def residual(p: Distribution, q: Distribution) -> list[float] | None:
    """`max(p - q, 0)` normalised; None if nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return [share / total for share in left] if total > 0 else None


def verify_chosen(tokens: Sequence[int], parents: Sequence[int], draw_at: Callable[[int], int]) -> Accepted:
    """Walk the tree from the anchor; `draw_at(node)` samples the target's token after a node."""
    path, node = [0], 0
    while True:
        token = draw_at(node)
        matching = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == token]
        if not matching:
            return path, token
        node = matching[0]
        path.append(node)


def block_ratios(tokens: Sequence[int], p: Sequence[Distribution], q: Sequence[Distribution]) -> list[float]:
    """`r_i = min(1, r_{i-1} p(x_i) / q(x_i))` of arXiv 2403.10444, from `r_0 = 1` on."""
    ratios = [1.0]
    for i in range(1, len(tokens)):
        ratios.append(min(1.0, ratios[-1] * p[i - 1][tokens[i]] / q[i - 1][tokens[i]]))
    return ratios


def block_acceptance_prob(
    i: int, ratios: Sequence[float], p: Sequence[Distribution], q: Sequence[Distribution]
) -> float:
    """`h_i` of arXiv 2403.10444: the probability that draft token i is accepted, whatever happens to later ones."""
    ratio = ratios[i]
    if i == len(ratios) - 1 or ratio == 1:
        return ratio
    left = sum(max(ratio * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True))
    return left / (left + 1 - ratio)


def verify_block(
    tokens: Sequence[int],
    p: Sequence[Distribution],
    q: Sequence[Distribution],
    uniforms: Sequence[float],
    tests: Sequence[float],
) -> Accepted:
    """Block verification of a chain of sampled draft tokens (arXiv 2403.10444, algorithm 2)."""
    ratios = block_ratios(tokens, p, q)
    last = 0
    for i in range(1, len(tokens)):
        if tests[i] < block_acceptance_prob(i, ratios, p, q):
            last = i
    dist: Distribution = p[last]
    if last < len(tokens) - 1:
        dist = residual([ratios[last] * share for share in p[last]], q[last]) or p[last]
    return list(range(last + 1)), draw_token(dist, uniforms[last])
