"""Picture of the results of a benchmark."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

from blockdraft_bench.methods import PLAIN
from blockdraft_bench.results import Results


def draw(results: Results) -> bytes | None:
    """Draw speed-ups by prompt set, and accepted draft tokens by position, as PNG.

    Returns:
        The picture, or None if matplotlib is not installed.
    """
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(13, 4.5), dpi=120, layout="constrained")
    except ImportError:
        return None
    speedups, acceptance = figure.subplots(1, 2)
    drafted = [method for method in results.methods if method != PLAIN]
    for number, method in enumerate(drafted):
        _bars(speedups, results, method, number, 0.8 / len(drafted))
        shares = results.methods[method].acceptance_by_position
        acceptance.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4)
    speedups.axhline(1, color="black", linewidth=1, linestyle="--")
    speedups.set(title="Speed-up over plain decoding", ylabel="Ratio of tokens/s (lines: range of the repeats)")
    speedups.set_xticks(range(len(results.sets)), list(results.sets))
    acceptance.set(title="Accepted draft tokens", xlabel="Position i in the block", ylabel="S_i", ylim=(0, 1.02))
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    for axes in (speedups, acceptance):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    if drafted:
        figure.legend(loc="outside lower center", frameon=False, ncols=4)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _bars(axes: Any, results: Results, method: str, number: int, width: float) -> None:
    for place, figures in enumerate(results.sets.values()):
        measured = figures[method]
        if measured.speedup is None:
            continue
        repeats = [measured.speedup, *measured.speedup_by_repeat]
        axes.bar(
            place - 0.4 + (number + 0.5) * width,
            measured.speedup,
            0.92 * width,
            yerr=[[measured.speedup - min(repeats)], [max(repeats) - measured.speedup]],
            error_kw={"linewidth": 0.8},
            color=f"C{number}",
            label=None if place else method,
        )
