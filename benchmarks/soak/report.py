"""What the samples of a soak say: whether memory is flat, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 0.3  # share of a run before memory must be flat
MOST_GROWTH = 0.02  # of the resident memory, from there to the end
SHORTEST_MINUTES = 5.0  # a run from which flatness can be told


@dataclass(frozen=True)
class Sample:
    seconds: float
    resident: int  # bytes
    open: int
    tokens: int


def growth(samples: Sequence[Sample]) -> float:
    """By which share of its mean the resident memory grows after the warm-up, by a straight line through it."""
    kept = [sample for sample in samples if sample.seconds >= WARM_UP * samples[-1].seconds]
    seconds, resident = (np.array([getattr(s, name) for s in kept], float) for name in ("seconds", "resident"))
    if len(kept) < 3:
        return 0.0
    slope = np.polyfit(seconds - seconds[0], resident, 1)[0]
    return float(slope * (seconds[-1] - seconds[0]) / resident.mean())


def table(summary: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in summary.items():
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        lines.append(f"| {name} | {shown:.3f} |" if isinstance(shown, float) else f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def picture(samples: Sequence[Sample], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [sample.seconds / 60 for sample in samples]
    pairs = list(zip(samples, samples[1:], strict=False))
    speeds = [(b.tokens - a.tokens) / max(b.seconds - a.seconds, 1e-9) for a, b in pairs]
    figure, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True)
    axes[0].plot(minutes, [sample.resident / 2**20 for sample in samples])
    axes[0].set_ylabel("resident memory, MiB")
    axes[1].plot(minutes, [sample.open for sample in samples])
    axes[1].set_ylabel("requests under way")
    axes[2].plot(minutes[1:], speeds, linewidth=0.7)
    axes[2].set_ylabel("tokens/s of ended requests")
    axes[2].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
