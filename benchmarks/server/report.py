"""A table and a picture of all runs, with what was expected beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.report import spread, table
from benchmarks.server.runs import Run

SERVER, PLAIN, ENGINE = "server", "server-plain", "engine"  # ours with drafting and without, and no server at all
LLAMA, LLAMA_DRAFTS = "llama-server", "llama-server-drafting"
WAYS = (SERVER, PLAIN, ENGINE, LLAMA, LLAMA_DRAFTS)
MIB = 2**20
# Of the server's tokens/s to another way's: least ratio, at which streams (None: at all), from which width on.
EXPECTED: tuple[tuple[str, float, int | None, int], ...] = (
    (ENGINE, 0.9, 16, 4),
    (PLAIN, 0.98, None, 1),
    (LLAMA, 2.0, 16, 1),
)


def ratios(runs: Sequence[Run], width: int, streams: int, way: str, other: str) -> list[float]:
    """Of the tokens/s of two ways, one for each repeat that has both."""
    speeds = {(run.way, run.repeat): run.tokens_per_second for run in _at(runs, width, streams)}
    return [
        speeds[way, repeat] / speeds[other, repeat]
        for repeat in sorted({run.repeat for run in runs})
        if (way, repeat) in speeds and speeds.get((other, repeat))
    ]


def _at(runs: Sequence[Run], width: int, streams: int) -> list[Run]:
    return [run for run in runs if (run.width, run.streams) == (width, streams)]


def page(runs: Sequence[Run], missing: Mapping[str, str]) -> str:
    """What was found, as Markdown."""
    parts = [
        "Medians of the repeats; ratios are taken within a repeat, with the range of the repeats in brackets. A "
        "token's time is the mean within an answer, a piece is what arrives at once."
    ]
    for width in sorted({run.width for run in runs}):
        own = [run for run in runs if run.width == width]
        parts.append(f"## {own[0].parameters / 1e6:.0f} M parameters\n\n" + _speeds(own, width))
    parts.append("## Expected and measured\n\n" + _expectations(runs))
    unequal = {way: (sum(r.unequal for r in found), sum(r.problems for r in found), sum(r.answers for r in found))
               for way in WAYS if (found := [run for run in runs if run.way == way])}  # fmt: skip
    lines = [f"- {way}: {other} of {total} differ, {broken} failed" for way, (other, broken, total) in unequal.items()]
    parts.append("## Answers, beside those decoded plainly and alone\n\n" + "\n".join(lines))
    if missing:
        parts.append("## Missing\n\n" + "\n".join(f"- {way}: {reason}" for way, reason in missing.items()))
    return "\n\n".join(parts) + "\n"


def _speeds(own: Sequence[Run], width: int) -> str:
    rows = []
    for streams in sorted({run.streams for run in own}):
        for way in WAYS:
            found = [run for run in _at(own, width, streams) if run.way == way]
            if not found:
                continue

            def middle(name: str, found: list[Run] = found) -> float:
                return median(getattr(run, name) for run in found)

            times = [
                f"{1e3 * middle(f'{name}_median'):.3g} / {1e3 * middle(f'{name}_p95'):.3g}"
                for name in ("first", "token", "piece")
            ]
            over = spread(ratios(own, width, streams, SERVER, way)) if way != SERVER else ""
            speed, memory = f"{middle('tokens_per_second'):.0f}", f"{max(r.peak_bytes for r in found) / MIB:.0f}"
            rows.append([str(streams), way, speed, over, *times, memory])
    header = ["streams", "way", "tokens/s", "server / it", "first, ms: median / p95", "token, ms", "piece, ms", "MiB"]
    return table(header, rows)


def _expectations(runs: Sequence[Run]) -> str:
    rows = []
    for other, least, only, from_width in EXPECTED:
        for width in sorted({run.width for run in runs}):
            for streams in sorted({run.streams for run in runs}):
                found = ratios(runs, width, streams, SERVER, other)
                if not found or only not in (None, streams):
                    continue
                judged = width >= from_width
                verdict = ("yes" if median(found) >= least else "NO") if judged else "reported"
                wanted = f"at least {least:g}" if judged else ""
                rows.append([f"server / {other}", f"{width}", f"{streams}", wanted, spread(found), verdict])
    return table(["ratio of tokens/s", "width", "streams", "expected", "measured", "holds"], rows)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Tokens/s, seconds to the first token, and a token's time by streams, a row of panels for each width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    widths = sorted({run.width for run in runs})
    figure, rows = plt.subplots(len(widths), 3, figsize=(13, 4 * len(widths)), layout="constrained", squeeze=False)
    shown = {
        "tokens_per_second": ("tokens/s", 1.0),
        "first_median": ("ms to the first token, median", 1e3),
        "token_median": ("ms a token, median", 1e3),
    }
    for panels, width in zip(rows, widths, strict=True):
        for axes, (name, (title, factor)) in zip(panels, shown.items(), strict=True):
            for colour, way in enumerate(WAYS):
                points = [
                    (streams, factor * median(values))
                    for streams in sorted({run.streams for run in runs})
                    if (values := [getattr(r, name) for r in _at(runs, width, streams) if r.way == way])
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{colour}", label=way)
            axes.set(xscale="log", xlabel="streams", title=f"{title} (width {width})", ylim=(0, None))
            streams = sorted({run.streams for run in runs})
            axes.set_xticks(streams, [str(each) for each in streams])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
