"""The picture of all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.diffusion.converted import Answer
from benchmarks.diffusion.report import CLIPPED, Found, right, speed, tokens_per_forward
from benchmarks.diffusion.strategies import ITSELF, Sample
from benchmarks.diffusion.text import TextRun
from benchmarks.harness.turns import groups

MARKERS = "os^vD<>PXp*h"


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
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = (8 * columns, 5.5 * rows)
    figure, places = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, panel in zip(places.flat, panels, strict=False):
        panel(axes)
        axes.grid(alpha=0.3)
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
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
    """Models by colour, strategies by form."""
    from matplotlib.ticker import LogLocator

    models = [model for model in groups(samples, lambda one: one.model) if model != ITSELF]
    strategies = [strategy for strategy in groups(samples, lambda one: one.strategy) if strategy]
    for (model, strategy), own in groups(samples, lambda one: (one.model, one.strategy)).items():
        found = speed(own)
        if model == ITSELF:
            axes.axhline(found.bits, color="black", linestyle=":", label=ITSELF)
            continue
        x = found.tokens_per_forward if by == "forward" else found.tokens_per_second
        colour, form = f"C{models.index(model)}", MARKERS[strategies.index(strategy) % len(MARKERS)]
        axes.errorbar(x, found.bits, found.around, fmt=form, color=colour, alpha=0.8, elinewidth=0.8)
    for number, model in enumerate(models):
        axes.plot([], [], "s", color=f"C{number}", label=model)
    for number, strategy in enumerate(strategies):
        axes.plot([], [], MARKERS[number % len(MARKERS)], color="gray", label=strategy)
    title = f"Samples, judged by another model, by tokens per {by}"
    axes.set(xscale="log", xlabel=f"tokens per {by}", ylabel="bits per character", title=title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=8, ncols=2)


def _draw_answers(axes: Any, answers: Sequence[Answer]) -> None:
    for number, (way, own) in enumerate(groups(answers, lambda one: one.way).items()):
        x, (share, around) = tokens_per_forward(own), right(own)
        ends = [[100 * min(around, share)], [100 * min(around, 1 - share)]]
        axes.errorbar(
            x, 100 * share, ends, fmt=MARKERS[number % len(MARKERS)], color=f"C{number}", capsize=3, label=way
        )
    title = "A converted model beside the original"
    axes.set(xlabel="tokens per forward", ylabel="right answers, %", title=title)
    axes.legend(fontsize=8)
