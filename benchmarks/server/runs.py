"""What was measured, a line of a CSV file each, so that an interrupted run goes on."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One load of one way.

    Attributes:
        width: How many times as wide as the bundled pair.
        way: Of `benchmarks.server.load.WAYS`.
        streams: Requests at a time.
        requests: Those whose latencies are in the medians.
        first_median: Seconds to the first piece of an answer, and so on, see `heard.Figures`.
        unequal: Answers that are not those decoded plainly and alone.
        problems: Answers that broke off, failed, or had a form that is not right.
        peak_bytes: Most memory that its process has had.
    """

    width: int
    parameters: int
    way: str
    streams: int
    repeat: int
    seconds: float
    tokens_per_second: float
    requests: int
    first_median: float
    first_p95: float
    token_median: float
    token_p95: float
    piece_median: float
    piece_p95: float
    answers: int
    unequal: int
    problems: int
    peak_bytes: int

    @property
    def key(self) -> tuple[int, str, int, int]:
        return self.width, self.way, self.streams, self.repeat


class Runs:
    """All of them so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [field.name for field in fields(Run)]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(names) + "\n", encoding="utf-8")
        *complete, rest = path.read_text(encoding="utf-8").split("\n")
        if rest:  # cut off in the middle of a line
            path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
        kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
        self.all = [
            Run(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Run)})
            for line in csv.DictReader(complete)
        ]

    @property
    def had(self) -> set[tuple[int, str, int, int]]:
        return {run.key for run in self.all}

    def add(self, run: Run) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(asdict(run).values())
        self.all.append(run)
