"""What a cycle costs by the weights that it reads, and what that makes of tau.

A pass of any network over n tokens takes the time of the target's forward over n nodes, times the share of the target's
weights that it reads. So a drafter for which there is no compiled pass is judged by its work and not by who wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.kinds import Weights
from benchmarks.rivals.rows import Answers, Forward, Trained

# The time of the target's forward over so many nodes, over that of one.
Curve = Callable[[float], float]


def straight(cost_of_16: float) -> Curve:
    """A line through one node, which costs 1, and 16 nodes."""
    return lambda nodes: 1 + (cost_of_16 - 1) * (nodes - 1) / 15


def measured(forwards: list[Forward]) -> Curve:
    """Between the numbers of nodes that were measured in a line, and on beyond the last."""
    ordered = sorted(forwards, key=lambda forward: forward.nodes)
    nodes = [forward.nodes for forward in ordered]
    costs = [forward.seconds / ordered[0].seconds for forward in ordered]

    def curve(count: float) -> float:
        if count > nodes[-1] and len(nodes) > 1:
            slope = (costs[-1] - costs[-2]) / (nodes[-1] - nodes[-2])
            return costs[-1] + max(slope, 0.0) * (count - nodes[-1])
        return float(np.interp(count, nodes, costs))

    return curve


@dataclass(frozen=True)
class Costs:
    """Of one cycle, over a forward of the target over one node.

    Attributes:
        draft: In the drafter.
        rest: The target's forward over anchor and guesses, and whatever else there is.
        plain: A plain cycle.
    """

    draft: float
    rest: float
    plain: float = 1.0

    @property
    def ratio(self) -> float:
        """R."""
        return (self.draft + self.rest) / self.plain


def by_weights(
    answers: Answers, trained: Trained | Weights | None, target_weights: int, curve: Curve, host: float = 0.0
) -> Costs:
    """The cycle that these answers took on the mean.

    Args:
        trained: Says which weights the drafter reads; None for one without weights.
        host: What a cycle takes in no network, over a forward of one node.
    """
    draft = 0.0
    if trained is not None:
        passes: Mapping[int, float] = answers.passes_by_tokens
        draft = sum(count * curve(tokens) for tokens, count in passes.items()) * trained.passed / target_weights
        draft += curve(answers.tau) * trained.observed / target_weights
    return Costs(draft, curve(1 + answers.guesses) + host, 1.0 + host)
