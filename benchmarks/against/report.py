"""Ratios of paired measurements, and a table of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

RESAMPLES = 2000
SHARE = 0.95


@dataclass(frozen=True)
class Sample:
    """One measurement of one tree, as its child answered."""

    seconds: float
    host_seconds_per_forward: float | None
    answers: list[list[int]]
    cycles: int

    @property
    def speed(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


@dataclass(frozen=True)
class Cell:
    """A method at a batch size: samples of both trees, the i-th of one taken beside the i-th of the other."""

    method: str
    rows: int
    old: list[Sample]
    new: list[Sample]

    @property
    def ratios(self) -> list[float]:
        return [new.speed / old.speed for old, new in zip(self.old, self.new, strict=True)]

    @property
    def identical(self) -> bool:
        return all(sample.answers == self.old[0].answers for sample in [*self.old, *self.new])


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the median: what resampled pairs give in `SHARE` of the cases."""
    random = Random(seed)
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = round((1 - SHARE) / 2 * RESAMPLES)
    return medians[cut], medians[-1 - cut]


def host_microseconds(samples: Sequence[Sample]) -> float | None:
    known = [1e6 * s.host_seconds_per_forward for s in samples if s.host_seconds_per_forward is not None]
    return statistics.median(known) if known else None


def loops(answer: Sequence[int]) -> bool:
    from blockdraft.engine import loops

    return loops(answer)


def summary(cell: Cell) -> dict[str, Any]:
    low, high = interval(cell.ratios)
    return {
        "method": cell.method,
        "rows": cell.rows,
        "old_tokens_per_second": statistics.median(sample.speed for sample in cell.old),
        "new_tokens_per_second": statistics.median(sample.speed for sample in cell.new),
        "ratio": statistics.median(cell.ratios),
        "interval": [low, high],
        "old_host_microseconds": host_microseconds(cell.old),
        "new_host_microseconds": host_microseconds(cell.new),
        "identical": cell.identical,
        "looping": sum(map(loops, cell.new[0].answers)),
        "answers": len(cell.new[0].answers),
        "samples": [{k: v for k, v in asdict(s).items() if k != "answers"} for s in [*cell.old, *cell.new]],
    }


def table(summaries: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| | batch | old, tokens/s | new, tokens/s | new / old (95 % interval) | host, old | host, new | same tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        hosts = " | ".join(
            # Where guesses are made the drafter's time is in it too, so that it says nothing of the host.
            f"{host:.0f} us" if s["method"] == "plain" and (host := s[f"{tree}_host_microseconds"]) else ""
            for tree in ("old", "new")
        )
        ratio = f"{s['ratio']:.3f} ({s['interval'][0]:.3f} to {s['interval'][1]:.3f})"
        same = "yes" if s["identical"] else "NO"
        same += f", {s['looping']} of {s['answers']} loop" if s["looping"] else ""
        speeds = f"{s['old_tokens_per_second']:.1f} | {s['new_tokens_per_second']:.1f}"
        lines.append(f"| {s['method']} | {s['rows']} | {speeds} | {ratio} | {hosts} | {same} |")
    return "\n".join(lines) + "\n"
