"""Plots of the results of a benchmark."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.methods import PLAIN
from blockdraft.evaluation.results import Results
from blockdraft.evaluation.speed import Figures
from blockdraft.timing import PARTS

LABEL_WIDTH = 32  # characters of a method's name


def require_pictures() -> None:
    """Raise a UsageError if pictures cannot be drawn."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            f"Pictures need matplotlib, which cannot be imported ({error}); run pip install 'blockdraft[bench]', or "
            "leave them out with --no-pictures."
        ) from error


def _acceptance(results: Results) -> bytes:
    """Plot S_i of each method over all sets, as PNG."""
    figure, axes = _axes(width=5.5, methods=results.methods)
    longest = 1
    for method, figures in results.methods.items():
        shares = figures.acceptance_by_position
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=_label(method))
            longest = max(longest, len(shares))
    axes.set(
        title="Accepted draft tokens by position",
        xlabel="Position i in the block",
        ylabel="S_i: share of steps that accept tokens 1 to i",
        xlim=(0.5, longest + 0.5),
        ylim=(0.0, 1.02),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _png(figure, axes)


def _speedups(results: Results) -> bytes:
    """Plot each method's speed-up on each set and on all sets, as PNG."""
    figure, axes = _bars(results, lambda figures: figures.speedup, lambda figures: figures.speedup_by_repeat)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes.set(title="Speed-up over plain decoding", ylabel="Ratio of tokens/s (thin lines: range of the repeats)")
    return _png(figure, axes)


def _taus(results: Results) -> bytes:
    """Plot each method's tau on each set and on all sets, as PNG."""
    figure, axes = _bars(results, lambda figures: figures.tau)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes.set(title="Tokens per target forward pass", ylabel="tau")
    return _png(figure, axes)


def _bars(
    results: Results,
    value: Callable[[Figures], float | None],
    spread: Callable[[Figures], Sequence[float]] = lambda figures: (),
) -> tuple[Any, Any]:
    """Plot a bar for each method but plain decoding, on each set and on all sets.

    Args:
        value: Function for the height of a bar; None omits it.
        spread: Function for the values whose range a thin line shows.
    """
    groups = {
        f"{name}\n({counted(figures.methods[PLAIN].timed_prompts, 'prompt')})": figures.methods
        for name, figures in results.sets.items()
    }
    if len(groups) > 1:
        groups[f"all sets\n({counted(results.methods[PLAIN].timed_prompts, 'prompt')})"] = results.methods
    methods = [method for method in results.methods if method != PLAIN]
    width = 0.8 / max(len(methods), 1)
    room = max(1.3, 0.55 * len(methods), *(0.1 * len(name) for name in results.sets))
    figure, axes = _axes(width=max(3.5, 1 + len(groups) * room), methods=results.methods)
    for i, method in enumerate(methods):
        places = [g - 0.4 + (i + 0.5) * width for g in range(len(groups))]
        drawn = [(place, group[method]) for place, group in zip(places, groups.values(), strict=True)]
        drawn = [(place, figures) for place, figures in drawn if value(figures) is not None]
        if not drawn:
            continue
        heights = [value(figures) or 0.0 for _, figures in drawn]
        lows = [
            height - min(spread(figures), default=height) for height, (_, figures) in zip(heights, drawn, strict=True)
        ]
        highs = [
            max(spread(figures), default=height) - height for height, (_, figures) in zip(heights, drawn, strict=True)
        ]
        axes.bar(
            [place for place, _ in drawn],
            heights,
            0.92 * width,
            yerr=[lows, highs],
            capsize=2 if any([*lows, *highs]) else 0,
            error_kw={"linewidth": 0.8},
            label=_label(method),
        )
        for (place, _), height, high in zip(drawn, heights, highs, strict=True):
            axes.annotate(
                f"{height:.2f}", (place, height + high), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    return figure, axes


def _profiles(results: Results) -> bytes | None:
    """Plot the parts of each method's step, as PNG, or return None without profiles."""
    if not results.profiles:
        return None
    figure, axes = _axes(width=2 + 0.9 * len(results.profiles), methods=dict.fromkeys(PARTS))
    colours = import_module("matplotlib").colormaps["tab10"].colors
    names = [_label(method) for method in results.profiles]
    below = [0.0] * len(names)
    for part, colour in zip(PARTS, colours, strict=False):
        heights = [1000 * profile.seconds[part] for profile in results.profiles.values()]
        axes.bar(names, heights, 0.7, bottom=below, label=part, color=colour)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for name, top, profile in zip(names, below, results.profiles.values(), strict=True):
        note = f"host {100 * profile.host:.1f}%"
        axes.annotate(note, (name, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="Where the time of a step goes", ylabel="ms per step")
    axes.tick_params(axis="x", labelrotation=20)
    axes.margins(y=0.1)
    return _png(figure, axes)


PICTURES: dict[str, Callable[[Results], bytes | None]] = {
    "acceptance.png": _acceptance,
    "speedup.png": _speedups,
    "tau.png": _taus,
    "profile.png": _profiles,
}


def _axes(width: float, methods: Mapping[str, object]) -> tuple[Any, Any]:
    """Return figure and axes of this width in inches, with room for a legend of these methods."""
    # Without pyplot there are no windows and no global state; saving as PNG uses the Agg backend.
    legend = 0.6 + 0.09 * max(len(_label(method)) for method in (*methods, "plain decoding"))
    size = (width + legend, 4.5)
    figure = import_module("matplotlib.figure").Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _label(method: str) -> str:
    return method if len(method) <= LABEL_WIDTH else f"...{method[3 - LABEL_WIDTH :]}"


def _png(figure: Any, axes: Any) -> bytes:
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
