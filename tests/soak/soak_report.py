"""Samples of a soak: growth of memory, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness.report import picture, table

WARM_UP = 0.3  # share of a run before memory must be flat
MAX_GROWTH = 0.02  # of the resident memory, from there to the end
SHORTEST_MINUTES = 5.0  # a run from which flatness can be told


@dataclass(frozen=True)
class Sample:
    """State at a second of the run: resident bytes, requests under way, tokens of ended requests so far."""

    seconds: float
    resident: int
    open: int
    tokens: int


def growth(samples: Sequence[Sample]) -> float:
    """Return the growth of the resident memory after the warm-up over its mean, by a straight line."""
    kept = [sample for sample in samples if sample.seconds >= WARM_UP * samples[-1].seconds]
    if len(kept) < 3:
        return 0.0
    seconds, resident = (np.array([getattr(s, name) for s in kept], float) for name in ("seconds", "resident"))
    slope = np.polyfit(seconds - seconds[0], resident, 1)[0]
    return float(slope * (seconds[-1] - seconds[0]) / resident.mean())


def grown_too_much(samples: Sequence[Sample], minutes: float) -> list[str]:
    """Return a failure if memory has grown and the run is long enough to tell."""
    grown = growth(samples)
    return [f"memory has grown by {grown:.1%}"] if minutes >= SHORTEST_MINUTES and grown > MAX_GROWTH else []


def summary_table(summary: dict[str, Any]) -> str:
    lines = []
    for name, value in summary.items():
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        lines.append([name, f"{shown:.3f}" if isinstance(shown, float) else str(shown)])
    return table(["", ""], lines) + "\n"


def picture_of(samples: Sequence[Sample], path: Path) -> None:
    minutes = [sample.seconds / 60 for sample in samples]
    pairs = list(zip(samples, samples[1:], strict=False))
    speeds = [(b.tokens - a.tokens) / max(b.seconds - a.seconds, 1e-9) for a, b in pairs]
    with picture(path, 3, 1, figsize=(9, 7), sharex=True) as (_, panels):
        memory, open_requests, speed = panels[:, 0]
        memory.plot(minutes, [sample.resident / 2**20 for sample in samples])
        memory.set_ylabel("resident memory, MiB")
        open_requests.plot(minutes, [sample.open for sample in samples])
        open_requests.set_ylabel("requests under way")
        speed.plot(minutes[1:], speeds, linewidth=0.7)
        speed.set(ylabel="tokens/s of ended requests", xlabel="minutes")
