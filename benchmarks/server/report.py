"""Tables and a picture of all runs, with expected figures beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import interleaving
from benchmarks.harness.report import picture, spread, table
from benchmarks.server.load import ENGINE, LLAMA, PLAIN, SERVER, WAYS, Run

# Of the server's tokens/s to another way's: least ratio, at which streams (None: at all), from which width on.
EXPECTED = ((ENGINE, 0.9, 16, 4), (PLAIN, 0.98, None, 1), (LLAMA, 2.0, 16, 1))
SHOWN = {
    "tokens_per_second": ("tokens/s", 1.0),
    "first_median": ("ms to the first token, median", 1e3),
    "token_median": ("ms a token, median", 1e3),
}


def ratios(runs: Sequence[Run], width: int, streams: int, way: str, other: str) -> list[float]:
    """Return the ratios of the tokens/s of two ways, one for each repeat that has both."""
    rates: dict[str, dict[int, float]] = {way: {}, other: {}}
    for run in sorted(runs, key=lambda run: run.repeat):
        if (run.width, run.streams) == (width, streams) and run.way in rates:
            rates[run.way][run.repeat] = run.tokens_per_second
    return interleaving.ratios(rates[way], rates[other])


def page(runs: Sequence[Run], missing: Mapping[str, str]) -> str:
    """Return all results as Markdown."""
    parts = [
        "Medians of the repeats; ratios are taken within a repeat, with the range of the repeats in brackets. A "
        "token's time is the mean within an answer, a piece is what arrives at once."
    ]
    for width, own in sorted(interleaving.groups(runs, lambda run: run.width).items()):
        parts.append(f"## {own[0].parameters / 1e6:.0f} M parameters\n\n" + _speeds(own, width))
    parts.append("## Expected and measured\n\n" + _expectations(runs))
    by_way = interleaving.groups(sorted(runs, key=lambda run: WAYS.index(run.way)), lambda run: run.way)
    counts = {way: [sum(getattr(run, name) for run in own) for name in ("unequal", "answers", "problems")]
              for way, own in by_way.items()}  # fmt: skip
    lines = [f"- {way}: {other} of {total} differ, {failed} failed" for way, (other, total, failed) in counts.items()]
    parts.append("## Answers, beside those decoded plainly and alone\n\n" + "\n".join(lines))
    if missing:
        parts.append("## Missing\n\n" + "\n".join(f"- {way}: {reason}" for way, reason in missing.items()))
    return "\n\n".join(parts) + "\n"


def _speeds(own: Sequence[Run], width: int) -> str:
    lines = []
    ordered = sorted(own, key=lambda run: (run.streams, WAYS.index(run.way)))
    for (streams, way), found in interleaving.groups(ordered, lambda run: (run.streams, run.way)).items():
        middle = {name: median(getattr(run, name) for run in found) for name in vars(found[0]) if name != "way"}
        times = [
            f"{1e3 * middle[f'{name}_median']:.3g} / {1e3 * middle[f'{name}_p95']:.3g}"
            for name in ("first", "token", "piece")
        ]
        over = spread(ratios(own, width, streams, SERVER, way)) if way != SERVER else ""
        memory = f"{max(run.peak_bytes for run in found) / 2**20:.0f}"
        lines.append([str(streams), way, f"{middle['tokens_per_second']:.0f}", over, *times, memory])
    header = ["streams", "way", "tokens/s", "server / it", "first, ms: median / p95", "token, ms", "piece, ms", "MiB"]
    return table(header, lines)


def _expectations(runs: Sequence[Run]) -> str:
    lines = []
    for other, least, only, from_width in EXPECTED:
        for width in sorted({run.width for run in runs}):
            for streams in sorted({run.streams for run in runs}):
                found = ratios(runs, width, streams, SERVER, other)
                if not found or only not in (None, streams):
                    continue
                judged = width >= from_width
                verdict = ("yes" if median(found) >= least else "NO") if judged else "reported"
                wanted = f"at least {least:g}" if judged else ""
                lines.append([f"server / {other}", f"{width}", f"{streams}", wanted, spread(found), verdict])
    return table(["ratio of tokens/s", "width", "streams", "expected", "measured", "holds"], lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw tokens/s, time to the first token, and time per token by streams, a row of panels for each width."""
    widths, all_streams = sorted({run.width for run in runs}), sorted({run.streams for run in runs})
    values = interleaving.groups(runs, lambda run: (run.width, run.way, run.streams))
    with picture(path, len(widths), 3, figsize=(13, 4 * len(widths))) as (_, lines):
        for panels, width in zip(lines, widths, strict=True):
            for axes, (name, (title, factor)) in zip(panels, SHOWN.items(), strict=True):
                for colour, way in enumerate(WAYS):
                    points = [
                        (streams, factor * median(getattr(run, name) for run in found))
                        for streams in all_streams
                        if (found := values.get((width, way, streams)))
                    ]
                    if points:
                        axes.plot(*zip(*points, strict=True), "o-", color=f"C{colour}", label=way)
                axes.set(xscale="log", xlabel="streams", title=f"{title} (width {width})", ylim=(0, None))
                axes.set_xticks(all_streams, [str(each) for each in all_streams])
                axes.minorticks_off()
                axes.grid(alpha=0.3)
                axes.legend(fontsize=8)
