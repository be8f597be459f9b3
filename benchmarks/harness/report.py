"""Tables in Markdown, pictures, and atomic writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int | None = None) -> str:
    """Return a table in Markdown.

    Args:
        left: Number of first columns that are aligned to the left; all others are to the right. None aligns none.
    """
    marks = ["---" if left is None or i < left else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, marks, *lines))


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Format the median of some values with their range, such as "1.05 (1.01 to 1.10)"."""
    known = list(values)
    if not known:
        return ""
    return f"{statistics.median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def number(value: float | None, form: str = ".2f", unknown: str = "") -> str:
    """Format a number that may be unknown."""
    return unknown if value is None else format(value, form)


def write_files(folder: Path, files: Mapping[str, str | bytes | Any]) -> list[Path]:
    """Write files, each to a temporary name and renamed. Values other than texts and bytes are written as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content, indent=1) + "\n"
        unfinished = folder / f"{name}.tmp"
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(folder / name)
    return [folder / name for name in files]


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its array of panels, and write it as PNG at the end.

    Args:
        options: As of `matplotlib.pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, squeeze=False, **({"layout": "constrained"} | options))
    try:
        yield figure, panels
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


def log_scale(axes: Any, axis: str, ticks: Sequence[float] | None = None, form: str = "{:g}") -> None:
    """Make an axis ("x" or "y") logarithmic, with numbers at these ticks, or at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator

    axes.set(**{f"{axis}scale": "log"})
    which = getattr(axes, f"{axis}axis")
    if ticks is None:
        which.set_major_locator(LogLocator(subs=(1, 2, 5)))
        which.set_major_formatter("{x" + form[1:])
    else:
        which.set_ticks(ticks, [form.format(tick) for tick in ticks])
    axes.minorticks_off()
