"""Progress of a run: callbacks for the screen, a log of JSON lines, and a plot of its curves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FINISH = "finish"  # file in a run's folder that requests a complete end of the run
SMOOTHING = 0.9  # weight of the past in the exponential mean that smooths training curves


@dataclass(frozen=True)
class Progress:
    """Callbacks by which a run reports to its caller. Only the main process calls them.

    Attributes:
        report: Called with the present stage, the number of units done and the number of units in all.
        note: Called with a sentence that should stay on the screen.
    """

    report: Callable[[str, int, int], None] = lambda stage, done, total: None
    note: Callable[[str], None] = lambda text: None


def run_folder(out: Path) -> Path:
    """Return the folder of recipe, log, curves and checkpoints of the run that writes its drafter to `out`."""
    return out.with_name(f"{out.name}.run")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, or none if there is no such file.

    A line that a killed process left unfinished is skipped.
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


class RunLog:
    """The file `log.jsonl`, with one line of metrics per step.

    Args:
        folder: Folder of the run.
        step: Number of steps in the checkpoint that the run resumes from; lines of later steps are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / "log.jsonl"
        self.lines = [line for line in read_log(self._path) if line["step"] <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        partial.replace(self._path)

    def add(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def last(self, name: str) -> Any:
        """Return the latest value of this metric, or None if there is none."""
        return next((line[name] for line in reversed(self.lines) if line.get(name) is not None), None)


def draw_curves(log: RunLog, path: Path) -> bool:
    """Draw loss, accepted length with tau, and accuracy by position. Return False if matplotlib is not installed."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(13, 4), dpi=120, layout="constrained")
    except ImportError:
        return False
    losses, lengths, accuracies = figure.subplots(1, 3)
    for axes, name, title in ((losses, "loss", "Loss"), (lengths, "accepted_length", "Accepted length and tau")):
        _curve(axes, log, name, "training", smooth=True)
        _curve(axes, log, f"held_out_{name}", "held out", marker="o")
        axes.set(title=title, xlabel="Step")
    _curve(lengths, log, "tau", "tau, by the engine", marker="s")
    accuracy = log.last("held_out_accuracy") or []
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


def _curve(axes: Any, log: RunLog, name: str, label: str, smooth: bool = False, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in log.lines if line.get(name) is not None]
    if not points:
        return
    values, mean = [], points[0][1]
    for _, value in points:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value if smooth else value
        values.append(mean)
    axes.plot([step for step, _ in points], values, label=label, **{"markersize": 4, **style})
