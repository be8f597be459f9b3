"""What was measured, a line of a CSV file each, so that an interrupted run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.records import Records


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

    KEY = ("width", "way", "streams", "repeat")

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


class Runs(Records[Run]):
    """All of them so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(Run, path)
