"""Tables in a terminal, and the numbers in their cells."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

SHOWN_POSITIONS = 4  # of S_i; the JSON has all
SHARES = f"S_1..S_{SHOWN_POSITIONS} %"


def new_table(console: Console, *headers: str, **settings: Any) -> Table:
    """Return an empty table. Headers that begin with ">" are right-aligned."""
    lines = box.SIMPLE if console.is_terminal else None
    table = Table(box=lines, pad_edge=False, caption_justify="left", title_justify="left", **settings)
    for header in headers:
        table.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left")
    return table


def number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share in percent, rounded down, so that 100 means all."""
    return "?" if share is None else f"{int(1000 * share) / 10:g}"


def percents(shares: tuple[float, ...]) -> str:
    """Return the first values of S_i in percent."""
    return " ".join(f"{100 * share:.0f}" for share in shares[:SHOWN_POSITIONS])
