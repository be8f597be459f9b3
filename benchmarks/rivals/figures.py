"""What the lines of the CSV files say together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median

from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.model import Costs, by_weights, measured, straight
from benchmarks.rivals.rows import NATIVE, PLAIN, TORCH, Answers, Cycle, Forward, Speed, Trained
from benchmarks.rivals.ways import parse

CHAINS, TREES, BOTH = "chains", "trees", "all"


@dataclass(frozen=True)
class Place:
    """Where drafters are compared.

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
    """Attributes:
    target_weights: Those that a forward of the target reads.
    cost_of_16: Of a forward over 16 nodes, over one of one node, in the regime that is simulated.
    """

    target_weights: int
    cost_of_16: float
    trained: Sequence[Trained] = ()
    answers: Sequence[Answers] = ()
    forwards: Sequence[Forward] = ()
    cycles: Sequence[Cycle] = ()
    speeds: Sequence[Speed] = field(default_factory=list)

    @cached_property
    def kinds(self) -> list[str]:
        found = {row.kind for row in self.answers}
        return [name for name in KINDS if name in found]

    @cached_property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(row.set for row in self.answers))

    @cached_property
    def temperatures(self) -> list[float]:
        return sorted({row.temperature for row in self.answers})

    @cached_property
    def widths(self) -> list[int]:
        return sorted({row.width for row in self.cycles})

    @cached_property
    def _trained(self) -> dict[tuple[str, int], Trained]:
        return {(row.kind, row.seed): row for row in self.trained}

    @cached_property
    def _answers(self) -> dict[tuple[str, float], list[Answers]]:
        found = defaultdict(list)
        for row in self.answers:
            if row.kind != PLAIN:
                found[row.kind, row.temperature].append(row)
        return found

    @cached_property
    def _cycles(self) -> dict[tuple[str, int, str, int, str], list[Cycle]]:
        found = defaultdict(list)
        for row in self.cycles:
            found[row.kind, row.width, row.running, row.batch, row.way].append(row)
        return found

    def of(self, kind: str, temperature: float, way: str | None = None) -> list[Answers]:
        return [row for row in self._answers[kind, temperature] if way in (None, row.way)]

    def ways(self, kind: str, trees: bool) -> list[str]:
        """Of a drafter, from few guesses to many."""
        names = {row.way for row in self.answers if row.kind == kind and row.way != PLAIN}
        return sorted((name for name in names if parse(name).tree == trees), key=lambda name: parse(name).guesses)

    def tau(self, kind: str, temperature: float, way: str, name: str | None = None) -> dict[int, float]:
        """By seed, of a prompt set or the mean of all."""
        found = defaultdict(list)
        for row in self.of(kind, temperature, way):
            if name in (None, row.set):
                found[row.seed].append(row.tau)
        return {seed: mean(taus) for seed, taus in found.items()}

    def shares(self, kind: str, temperature: float, way: str) -> list[float]:
        """S_1, S_2, ... as means over seeds and sets."""
        rows = [row.shares for row in self.of(kind, temperature, way)]
        longest = max(map(len, rows), default=0)
        return [mean(row[i] if i < len(row) else 0.0 for row in rows) for i in range(longest)]

    def is_compiled(self, kind: str) -> bool:
        return any(row.compiled for row in self.cycles if row.kind == kind and row.running == NATIVE)

    def ratio(self, kind: str, width: int, running: str, batch: int, way: str) -> float | None:
        """R as measured, the median of the repeats."""
        rows = self._cycles[kind, width, running, batch, way]
        return median(row.seconds / row.plain_seconds for row in rows) if rows else None

    def draft_seconds(self, kind: str, width: int, running: str, batch: int, way: str) -> float | None:
        rows = self._cycles[kind, width, running, batch, way]
        return median(row.draft_seconds for row in rows) if rows else None

    # Places

    @cached_property
    def regime(self) -> Place:
        return Place(
            f"16 tokens cost {self.cost_of_16:g}, draft passes by weights",
            lambda row: self._by_weights(row, straight(self.cost_of_16)),
        )

    @cached_property
    def regime_measured(self) -> Place:
        width = max(self.widths, default=1)
        return Place(
            f"16 tokens cost {self.cost_of_16:g}, draft passes measured, by torch's operations, width {width}",
            lambda row: self._regime_measured(row, width),
        )

    def here(self, width: int) -> Place:
        return Place(f"this CPU, width {width}, as measured", lambda row: self._here(row, width))

    def here_by_weights(self, width: int) -> Place:
        name = f"this CPU, width {width}, draft passes by weights"
        return Place(name, lambda row: self._here_by_weights(row, width))

    @property
    def places(self) -> list[Place]:
        here = [place(width) for width in self.widths for place in (self.here, self.here_by_weights)]
        return [self.regime, self.regime_measured, *here]

    def _by_weights(self, row: Answers, curve: Callable[[float], float], host: float = 0.0) -> Costs | None:
        trained = self._trained.get((row.kind, row.seed))
        if trained is None and KINDS[row.kind].trained:
            return None
        return by_weights(row, trained, self.target_weights, curve, host)

    def _regime_measured(self, row: Answers, width: int) -> Costs | None:
        plain = self._forward(width, TORCH)
        seconds = self.draft_seconds(row.kind, width, TORCH, 1, row.way)
        if not KINDS[row.kind].trained:
            seconds = 0.0
        if plain is None or seconds is None:
            return None
        return Costs(seconds / plain, straight(self.cost_of_16)(1 + row.guesses))

    def _here(self, row: Answers, width: int) -> Costs | None:
        ratio = self.ratio(row.kind, width, NATIVE, 1, row.way)
        return None if ratio is None else Costs(0.0, ratio)

    def _here_by_weights(self, row: Answers, width: int) -> Costs | None:
        own = [one for one in self.forwards if one.width == width and one.running == NATIVE]
        plain = [one.plain_seconds for one in self.cycles if (one.width, one.running, one.batch) == (width, NATIVE, 1)]
        alone = self._forward(width, NATIVE)
        if alone is None or not plain:
            return None
        return self._by_weights(row, measured(own), max(median(plain) / alone - 1, 0.0))

    def _forward(self, width: int, running: str) -> float | None:
        """Seconds of one node."""
        key = (width, running, 1)
        return next((one.seconds for one in self.forwards if (one.width, one.running, one.nodes) == key), None)

    # Comparisons

    def best(self, kind: str, temperature: float, place: Place, shape: str = BOTH) -> Best | None:
        """The fastest way among chains, trees, or both."""
        found = list[Best]()
        names = [*self.ways(kind, False), *self.ways(kind, True)]
        for way in names:
            if shape != BOTH and parse(way).tree != (shape == TREES):
                continue
            rows = [(row, place.costs(row)) for row in self.of(kind, temperature, way)]
            known = [(row, costs) for row, costs in rows if costs is not None]
            if not known:
                continue
            by_seed = defaultdict(list)
            for row, costs in known:
                by_seed[row.seed].append(row.tau / costs.ratio)
            speedups = {seed: mean(each) for seed, each in by_seed.items()}
            taus, ratios = ([row.tau for row, _ in known], [costs.ratio for _, costs in known])
            found.append(Best(way, speedups, mean(taus), mean(ratios)))
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
        return sorted({f"{row.kind} {row.way}" for row in self.answers if row.same < 1})
