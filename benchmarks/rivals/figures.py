"""Figures of all records together: tau, R, and the speed-up that they make, as measured and by weights.

By weights, a pass of any network over n tokens takes the time of the target's forward over n nodes, times the share of
the target's weights that it reads. So a drafter for which there is no compiled pass is judged by its work and not by
who wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

import numpy as np

from benchmarks.harness.turns import groups
from benchmarks.harness.turns import median as known_median
from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.records import NATIVE, PLAIN, TORCH, Answers, Cycle, Forward, Speed, Trained, parse

CHAINS, TREES, BOTH = "chains", "trees", "all"

Curve = Callable[[float], float]  # time of the target's forward over so many nodes, over that of one


def straight(cost_of_16: float) -> Curve:
    """Cost by number of nodes: a line through 1 at one node and the cost of 16."""
    return lambda nodes: 1 + (cost_of_16 - 1) * (nodes - 1) / 15


def measured(forwards: Iterable[Forward]) -> Curve:
    """Cost by number of nodes: lines between measured numbers, extended beyond the last."""
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
    """Costs of one cycle, over a forward of the target over one node.

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
    answers: Answers, trained: Trained | None, target_weights: int, curve: Curve, host: float = 0.0
) -> Costs:
    """Mean cycle of these answers.

    Args:
        trained: Says which weights the drafter reads; None for one without weights.
        host: What a cycle takes in no network, over a forward of one node.
    """
    draft = 0.0
    if trained is not None:
        passes = sum(count * curve(tokens) for tokens, count in answers.passes_by_tokens.items())
        draft = (passes * trained.passed + curve(answers.tau) * trained.observed) / target_weights
    return Costs(draft, curve(1 + answers.draft_tokens) + host, 1.0 + host)


@dataclass(frozen=True)
class Place:
    """A setting in which drafters are compared.

    Attributes:
        name: In words.
        costs: Of the cycles of these answers; None where that was not measured.
    """

    name: str
    costs: Callable[[Answers], Costs | None]


@dataclass(frozen=True)
class Best:
    """The way of a drafter that is fastest on the mean of seeds and prompt sets.

    Attributes:
        speedups: Over plain decoding, by seed, the mean of the sets.
        tau, ratio: Means over seeds and sets.
    """

    way: str
    speedups: dict[int, float]
    tau: float
    ratio: float

    @property
    def speedup(self) -> float:
        return mean(self.speedups.values())


@dataclass
class Figures:
    """All that was measured.

    Attributes:
        target_weights: Those that a forward of the target reads.
        cost_of_16: Of a forward over 16 nodes, over one of one node, in the regime that is simulated.
    """

    target_weights: int
    cost_of_16: float
    trained: Sequence[Trained] = ()
    answers: Sequence[Answers] = ()
    forwards: Sequence[Forward] = ()
    cycles: Sequence[Cycle] = ()
    speeds: Sequence[Speed] = ()

    def __post_init__(self) -> None:
        found = {record.kind for record in self.answers}
        self.kinds = [name for name in KINDS if name in found]
        self.sets = list(dict.fromkeys(record.set for record in self.answers))
        self.temperatures = sorted({record.temperature for record in self.answers})
        self._trained = {(record.kind, record.seed): record for record in self.trained}

    @property
    def widths(self) -> list[int]:
        return sorted({record.width for record in self.cycles})

    @cached_property
    def _answers(self) -> dict[tuple[str, float], list[Answers]]:
        return groups(self.answers, lambda record: (record.kind, record.temperature))

    @cached_property
    def _cycles(self) -> dict[tuple[str, int, str, int, str], list[Cycle]]:
        return groups(self.cycles, lambda each: (each.kind, each.width, each.running, each.batch, each.way))

    def of(self, kind: str, temperature: float, way: str | None = None) -> list[Answers]:
        return [each for each in self._answers.get((kind, temperature), []) if way in (None, each.way)]

    def ways(self, kind: str, trees: bool) -> list[str]:
        """Ways of a drafter, from few guesses to many."""
        names = {each.way for each in self.answers if each.kind == kind and each.way != PLAIN}
        return sorted((name for name in names if parse(name).tree == trees), key=lambda name: parse(name).draft_tokens)

    def tau(self, kind: str, temperature: float, way: str, name: str | None = None) -> dict[int, float]:
        """tau by seed, of a prompt set or the mean of all."""
        own = [each for each in self.of(kind, temperature, way) if name in (None, each.set)]
        return {seed: mean(each.tau for each in found) for seed, found in groups(own, lambda each: each.seed).items()}

    def shares(self, kind: str, temperature: float, way: str) -> list[float]:
        """S_1, S_2, ... as means over seeds and sets."""
        all_shares = [each.shares for each in self.of(kind, temperature, way)]
        longest = max(map(len, all_shares), default=0)
        return [mean(own[i] if i < len(own) else 0.0 for own in all_shares) for i in range(longest)]

    def is_compiled(self, kind: str) -> bool:
        return any(each.compiled for each in self.cycles if each.kind == kind and each.running == NATIVE)

    def ratio(self, kind: str, width: int, running: str, batch: int, way: str) -> float | None:
        """R as measured, the median of the repeats."""
        own = self._cycles.get((kind, width, running, batch, way), [])
        return known_median(each.seconds / each.plain_seconds for each in own)

    def draft_seconds(self, kind: str, width: int, running: str, batch: int, way: str) -> float | None:
        return known_median(each.draft_seconds for each in self._cycles.get((kind, width, running, batch, way), []))

    # Places

    @property
    def regime(self) -> Place:
        return Place(
            f"16 tokens cost {self.cost_of_16:g}, draft passes by weights",
            lambda answers: self._by_weights(answers, straight(self.cost_of_16)),
        )

    @property
    def regime_measured(self) -> Place:
        width = max(self.widths, default=1)
        return Place(
            f"16 tokens cost {self.cost_of_16:g}, draft passes measured, by torch's operations, width {width}",
            lambda answers: self._regime_measured(answers, width),
        )

    def here(self, width: int) -> Place:
        return Place(f"this CPU, width {width}, as measured", lambda answers: self._here(answers, width))

    def here_by_weights(self, width: int) -> Place:
        name = f"this CPU, width {width}, draft passes by weights"
        return Place(name, lambda answers: self._here_by_weights(answers, width))

    @property
    def places(self) -> list[Place]:
        here = [place(width) for width in self.widths for place in (self.here, self.here_by_weights)]
        return [self.regime, self.regime_measured, *here]

    def _by_weights(self, answers: Answers, curve: Curve, host: float = 0.0) -> Costs | None:
        trained = self._trained.get((answers.kind, answers.seed))
        if trained is None and KINDS[answers.kind].trained:
            return None
        return by_weights(answers, trained, self.target_weights, curve, host)

    def _regime_measured(self, answers: Answers, width: int) -> Costs | None:
        plain, seconds = self._forward(width, TORCH), 0.0
        if KINDS[answers.kind].trained:
            seconds = self.draft_seconds(answers.kind, width, TORCH, 1, answers.way)
        if plain is None or seconds is None:
            return None
        return Costs(seconds / plain, straight(self.cost_of_16)(1 + answers.draft_tokens))

    def _here(self, answers: Answers, width: int) -> Costs | None:
        ratio = self.ratio(answers.kind, width, NATIVE, 1, answers.way)
        return None if ratio is None else Costs(0.0, ratio)

    def _here_by_weights(self, answers: Answers, width: int) -> Costs | None:
        own = [each for each in self.forwards if (each.width, each.running) == (width, NATIVE)]
        plain = [e.plain_seconds for e in self.cycles if (e.width, e.running, e.batch) == (width, NATIVE, 1)]
        alone = self._forward(width, NATIVE)
        if alone is None or not plain:
            return None
        return self._by_weights(answers, measured(own), max(median(plain) / alone - 1, 0.0))

    def _forward(self, width: int, running: str) -> float | None:
        """Seconds of one node."""
        place = (width, running, 1)
        return next((each.seconds for each in self.forwards if (each.width, each.running, each.nodes) == place), None)

    # Comparisons

    def best(self, kind: str, temperature: float, place: Place, shape: str = BOTH) -> Best | None:
        """Fastest way among chains, trees, or both."""
        found = list[Best]()
        for way in [*self.ways(kind, False), *self.ways(kind, True)]:
            if shape != BOTH and parse(way).tree != (shape == TREES):
                continue
            costs = [(each, place.costs(each)) for each in self.of(kind, temperature, way)]
            known = [(each.seed, each.tau, cost.ratio) for each, cost in costs if cost is not None]
            if known:
                by_seed = groups(known, lambda each: each[0])
                speedups = {seed: mean(tau / ratio for _, tau, ratio in own) for seed, own in by_seed.items()}
                tau, ratio = (mean(each[i] for each in known) for i in (1, 2))
                found.append(Best(way, speedups, tau, ratio))
        return max(found, key=lambda each: each.speedup, default=None)

    def headline(
        self, temperature: float, place: Place, shape: str, one: str = "dflash", other: str = "eagle3"
    ) -> tuple[Best, Best, list[float]] | None:
        """The best of two drafters, and the ratio of their speed-ups for each seed that both have."""
        ours, theirs = (self.best(kind, temperature, place, shape) for kind in (one, other))
        if ours is None or theirs is None:
            return None
        seeds = sorted(ours.speedups.keys() & theirs.speedups.keys())
        return ours, theirs, [ours.speedups[seed] / theirs.speedups[seed] for seed in seeds]

    def order(self, temperature: float, place: Place) -> list[tuple[str, Best]]:
        """Drafters from the fastest to the slowest."""
        found = [(kind, best) for kind in self.kinds if (best := self.best(kind, temperature, place)) is not None]
        return sorted(found, key=lambda each: -each[1].speedup)

    def changed(self) -> list[str]:
        """Drafters whose answers are not those of plain decoding."""
        return sorted({f"{each.kind} {each.way}" for each in self.answers if each.same < 1})
