"""What comes out of the runs: speeds, ratios within a repeat, memory, and whether answers are the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from statistics import median

from benchmarks.sizes.runs import ANSWERS, Run
from benchmarks.sizes.ways import PLAIN, Way
from blockdraft.engine import loops


class Figures:
    """Prompts whose plain answer runs in circles with weights of some number of bits are left out there: such answers
    are easy to guess. Of a way, repeats count that have all prompts."""

    def __init__(self, runs: Sequence[Run]) -> None:
        circling = {
            (run.size, run.way.bits, run.set, run.prompt)
            for run in runs
            if run.method == PLAIN and not run.forced and loops([int(token) for token in run.answer.split()])
        }
        self.runs = [run for run in runs if (run.size, run.way.bits, run.set, run.prompt) not in circling]
        self.looping = Counter((size, bits) for size, bits, name, _ in circling if name == ANSWERS)
        self.parameters = {run.size: run.parameters for run in sorted(runs, key=lambda run: run.parameters)}
        self.sizes = list(self.parameters)
        self.sets = list(dict.fromkeys(run.set for run in self.runs))
        self.bits = sorted({run.way.bits for run in self.runs}, reverse=True)

    @cached_property
    def _by_way(self) -> dict[tuple[str, Way, str], list[Run]]:
        found: dict[tuple[str, Way, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            found[run.size, run.way, run.set].append(run)
        return dict(found)

    def ways(self, size: str | None = None, side: str | None = None, method: str | None = None) -> list[Way]:
        """Those that were measured, in the order in which they were."""
        found = dict.fromkeys(run.way for run in self.runs if size in (None, run.size))
        return [way for way in found if side in (None, way.side) and method in (None, way.method)]

    def _of(self, size: str, way: Way, name: str) -> list[Run]:
        return self._by_way.get((size, way, name), [])

    def rates(self, size: str, way: Way, name: str) -> dict[int, float]:
        """Tokens per second of each complete repeat, the first token of an answer left out."""
        prompts = {run.prompt for run in self.runs if run.size == size and run.set == name and run.way.bits == way.bits}
        repeats: dict[int, list[Run]] = defaultdict(list)
        for run in self._of(size, way, name):
            repeats[run.repeat].append(run)
        return {
            number: sum(run.new_tokens - 1 for run in own) / seconds
            for number, own in repeats.items()
            if len(own) == len(prompts) and (seconds := sum(run.decode_seconds for run in own)) > 0
        }

    def speed(self, size: str, way: Way, name: str) -> float | None:
        """Tokens per second, the median of the repeats."""
        rates = self.rates(size, way, name)
        return median(rates.values()) if rates else None

    def ratios(self, size: str, way: Way, other: Way, name: str) -> list[float]:
        """Of the speeds in the same repeat: a machine that is slower for a while slows both."""
        own, others = self.rates(size, way, name), self.rates(size, other, name)
        return [own[number] / others[number] for number in own if number in others]

    def fastest(self, size: str, side: str, bits: int, name: str, method: str | None = None) -> Way | None:
        speeds = {
            way: speed
            for way in self.ways(size, side, method)
            if way.bits == bits and (speed := self.speed(size, way, name)) is not None
        }
        return max(speeds, key=lambda way: speeds[way]) if speeds else None

    def tau(self, size: str, way: Way, name: str) -> float:
        """Tokens per cycle."""
        own = self._of(size, way, name)
        return sum(run.new_tokens - 1 for run in own) / max(sum(run.cycles for run in own), 1)

    def first_seconds(self, size: str, way: Way, name: str) -> float | None:
        own = self._of(size, way, name)
        return median(run.prefill_seconds for run in own) if own else None

    def peak(self, size: str, way: Way) -> int:
        """Bytes of its process."""
        return max(
            (run.peak_bytes for run in self.runs if run.size == size and run.way.process == way.process), default=0
        )

    def is_forced(self, size: str, name: str) -> bool:
        return any(run.forced for run in self.runs if run.size == size and run.set == name)

    def equal(self, size: str, way: Way, other: Way) -> float | None:
        """Share of the prompts that two ways answer alike, in all repeats."""
        own, others = self._answers(size, way), self._answers(size, other)
        both = own.keys() & others.keys()
        return sum(own[i] == others[i] and len(own[i]) == 1 for i in both) / len(both) if both else None

    def _answers(self, size: str, way: Way) -> dict[int, set[str]]:
        """By prompt; where repeats differ, several."""
        found: dict[int, set[str]] = defaultdict(set)
        for run in self._of(size, way, ANSWERS):
            found[run.prompt].add(run.answer)
        return found
