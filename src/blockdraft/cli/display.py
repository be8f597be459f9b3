"""What commands print: consoles, tables, notes on standard error, and progress."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.table import Table

LINE_SECONDS = 60.0  # between lines of progress where there is no terminal
BYTES = "bytes"  # noun of the progress of a download
SHOWN_POSITIONS = 4  # of S_i; the JSON has all
SHARES = f"S_1..S_{SHOWN_POSITIONS} %"


def standard(width: int = 100) -> Console:
    """Return the console of standard output. Brackets in names and tokens are not markup.

    Args:
        width: Width where the output is no terminal. Then there are no colours or lines, whatever the environment says.
    """
    is_terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        force_terminal=None if is_terminal else False,
        width=None if is_terminal else width,
        highlight=False,
        markup=False,
    )


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


def print_facts(console: Console, facts: Iterable[tuple[str, object]], width: int, indent: str = "") -> None:
    """Print names and values in two columns of which the first has this width. Empty values are left out."""
    for name, value in facts:
        if value not in (None, ""):
            console.print(f"{indent}{name:{width}}{value}", soft_wrap=True)


def tell(text: str | None) -> None:
    """Print a line on standard error; None prints nothing."""
    if text is not None:
        print(text, file=sys.stderr, flush=True)


class LogLines(logging.StreamHandler[TextIO]):
    """Prints records with the time of day on standard error.

    A record with the attribute `progress` replaces the one before it on a terminal. Elsewhere one a minute is printed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self._is_open = False  # whether the last line may be replaced
        self._next_progress = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        is_progress, is_terminal = getattr(record, "progress", False), self.stream.isatty()
        if is_progress and not is_terminal:
            if time.monotonic() < self._next_progress:
                return
            self._next_progress = time.monotonic() + LINE_SECONDS
        if self._is_open:
            self.stream.write("\r\x1b[K")  # erases the line
        self._is_open = is_progress and is_terminal
        self.terminator = "" if self._is_open else "\n"
        super().emit(record)


@contextmanager
def log_lines() -> Iterator[None]:
    """Print what is logged as `LogLines` does."""
    log, handler = logging.getLogger("blockdraft"), LogLines()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def exit_on_interrupt(message: Callable[[], str | None] | str) -> Iterator[None]:
    """Print a message after Ctrl-C, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        tell(message if isinstance(message, str) else message())
        raise typer.Exit(130) from None


@contextmanager
def progress(noun: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error how far a long command is.

    A terminal shows a bar. Otherwise a line is printed where each stage begins and ends, and once a minute; for
    `BYTES`, only where it begins.

    Args:
        noun: What is counted, such as "answers".

    Yields:
        A function that takes the stage (and news of it, such as a loss), the number done, and the total. The bar moves
        only in these calls, since an animation would take time from what is measured.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeColumn

        stage_column = TextColumn("{task.description}", markup=False)
        counts = (MofNCompleteColumn(), TextColumn(f"{noun}, left:"), TimeColumn()) if noun != BYTES else ()
        columns = stage_column, BarColumn(), *(counts or (DownloadColumn(),))
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("")
            yield lambda stage, done, total: bar.update(
                task, description=stage, completed=done, total=total, refresh=True
            )
        return
    stage_start = last_line = last_call = time.monotonic()
    last_done: int | None = None
    stages: list[str] = []

    def write_line(stage: str, done: int, total: int) -> None:
        nonlocal stage_start, last_line, last_call, last_done
        if noun == BYTES:
            if stages[-1:] != [stage]:
                stages.append(stage)
                tell(stage)
            return
        is_new = last_done is None or done < last_done
        stage_start = last_call if is_new else stage_start
        last_call, last_done = time.monotonic(), done
        if is_new or done == total or last_call - last_line >= LINE_SECONDS:
            last_line = last_call
            seconds = (last_call - stage_start) / max(done, 1) * (total - done)
            duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            tell(f"{stage}: {done} of {total} {noun}" + (f", about {duration} left" if 0 < done < total else ""))

    yield write_line
