"""The picture of all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.diffusion.converted import Answer
from benchmarks.diffusion.report import CLIPPED, Found, groups, right, speed, tokens_per_forward
from benchmarks.diffusion.strategies import ITSELF, Sample
from benchmarks.diffusion.text import TextRun


def draw(found: Found, path: Path) -> None:
    """Bits by block size, quality by speed of each strategy, right answers by speed: what of these was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: list[Callable[[Any], None]] = []
    if found.runs:
        panels.append(lambda axes: _draw_text(axes, found.runs))
    if found.samples:
        panels.append(lambda axes: _draw_speed(axes, found.samples, "forward"))
        panels.append(lambda axes: _draw_speed(axes, found.samples, "second"))
    if found.answers:
        panels.append(lambda axes: _draw_answers(axes, found.answers))
    figure, places = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5.5), squeeze=False, layout="constrained")
    for axes, panel in zip(places[0], panels, strict=True):
        panel(axes)
        axes.grid(alpha=0.3)
    if found.quick:
        figure.suptitle("A quick run: its models have learned next to nothing", color="tab:red")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_text(axes: Any, runs: Sequence[TextRun]) -> None:
    names = list(dict.fromkeys(run.model.removesuffix(CLIPPED) for run in runs))
    for model, own in groups(runs, lambda run: run.model).items():
        clipped, bits = model.endswith(CLIPPED), [run.bits for run in own]
        x = names.index(model.removesuffix(CLIPPED)) + (0.1 if clipped else -0.1)
        colour, middle = "tab:orange" if clipped else "tab:blue", fmean(bits)
        ends = [[middle - min(bits)], [max(bits) - middle]]
        label = "clipped noise" if clipped else "all noise"
        axes.errorbar(x, middle, ends, fmt="o", color=colour, capsize=4, label=label)
        axes.plot([x] * len(bits), bits, ".", color=colour, alpha=0.4)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="bits per held-out character", title="Likelihood by block size (mean, lowest and highest seed)")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())


def _draw_speed(axes: Any, samples: Sequence[Sample], by: str) -> None:
    for number, (model, own) in enumerate(groups(samples, lambda one: one.model).items()):
        if model == ITSELF:
            axes.axhline(speed(own).bits, color="black", linestyle=":", label=ITSELF)
            continue
        for i, (strategy, part) in enumerate(groups(own, lambda one: one.strategy).items()):
            found = speed(part)
            x = found.tokens_per_forward if by == "forward" else found.tokens_per_second
            axes.errorbar(x, found.bits, found.around, fmt="o", color=f"C{number}", label="" if i else model, alpha=0.8)
            axes.annotate(strategy, (x, found.bits), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xlabel=f"tokens per {by}", ylabel="bits per character, judged", title=f"Samples by tokens per {by}")
    axes.legend(fontsize=8)


def _draw_answers(axes: Any, answers: Sequence[Answer]) -> None:
    for number, (way, own) in enumerate(groups(answers, lambda one: one.way).items()):
        x, (share, around) = tokens_per_forward(own), right(own)
        axes.errorbar(x, 100 * share, 100 * around, fmt="o", color=f"C{number % 10}", capsize=3)
        axes.annotate(way, (x, 100 * share), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel="tokens per forward", ylabel="right answers, %", title="A converted model beside the original")
