"""The figures of a run: JSON lines while it runs, and a picture of their curves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

SMOOTHING = 0.9  # of the curve of training figures, from one step to the next


def run_folder(out: Path) -> Path:
    """Where recipe, log, curves and checkpoints of the run lie that writes a drafter to `out`."""
    return out.with_name(f"{out.name}.run")


def logged(log: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; none where there is no such file. One that was cut short when the process was killed is
    left out."""
    lines = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


class Records:
    """`log.jsonl`: a line a step, with the figures of an evaluation where there was one.

    Args:
        folder: Of the run.
        step: The step that the run goes on from; what was written of later ones is dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / "log.jsonl"
        self.lines = [line for line in logged(self._path) if line["step"] <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        partial.replace(self._path)

    def add(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def last(self, name: str) -> Any:
        """The last figure of this name; None where there is none."""
        return next((line[name] for line in reversed(self.lines) if line.get(name) is not None), None)


def draw(records: Records, path: Path) -> bool:
    """Draw loss, accepted length with tau, and accuracies by position. Returns False where matplotlib is missing."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(13, 4), dpi=120, layout="constrained")
    except ImportError:
        return False
    losses, lengths, accuracies = figure.subplots(1, 3)
    for axes, name, title in ((losses, "loss", "Loss"), (lengths, "accepted_length", "Accepted length and tau")):
        _curve(axes, records, name, "training", smooth=True)
        _curve(axes, records, f"held_out_{name}", "held out", marker="o")
        axes.set(title=title, xlabel="Step")
    _curve(lengths, records, "tau", "tau, by the engine", marker="s")
    accuracy = records.last("held_out_accuracy") or []
    accuracies.plot(range(1, len(accuracy) + 1), accuracy, marker="o")
    accuracies.set(title="Held-out accuracy, end", xlabel="Position in the block", ylim=(0, 1))
    for axes in (losses, lengths, accuracies):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True


def _curve(axes: Any, records: Records, name: str, label: str, smooth: bool = False, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in records.lines if line.get(name) is not None]
    if not points:
        return
    values, mean = [], points[0][1]
    for _, value in points:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value if smooth else value
        values.append(mean)
    axes.plot([step for step, _ in points], values, label=label, **{"markersize": 4, **style})
