"""What commands print: consoles, tables, notes on standard error, and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from blockdraft.models.pull import Progress as PullProgress

LINE_SECONDS = 60.0  # between lines of progress where there is no terminal


def terminal() -> Console:
    """Return the console of a terminal. Brackets in names and tokens are not markup."""
    return Console(highlight=False, markup=False)


def plain(width: int = 100) -> Console:
    """Return a console without colours and lines, whatever the environment asks for."""
    return Console(file=sys.stdout, force_terminal=False, highlight=False, markup=False, width=width)


def standard(width: int = 100) -> Console:
    """Return the console of standard output. The width is for output that is no terminal."""
    return terminal() if sys.stdout.isatty() else plain(width)


def new_table(console: Console, *headers: str, **settings: Any) -> Table:
    """Return an empty table. Headers that begin with ">" are right-aligned."""
    lines = box.SIMPLE if console.is_terminal else None
    table = Table(box=lines, pad_edge=False, caption_justify="left", **settings)
    for header in headers:
        table.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left")
    return table


def tell(text: str | None) -> None:
    """Print a line on standard error; None prints nothing."""
    if text is not None:
        print(text, file=sys.stderr, flush=True)


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

    A terminal shows a bar. Otherwise a line is printed where each stage begins and ends, and once a minute.

    Args:
        noun: What is counted, such as "answers".

    Yields:
        A function that takes the stage (and news of it, such as a loss), the number done, and the total. The bar moves
        only in these calls, since an animation would take time from what is measured.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        stage_column = TextColumn("{task.description}", markup=False)
        columns = stage_column, BarColumn(), MofNCompleteColumn(), TextColumn(f"{noun}, left:"), TimeRemainingColumn()
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("")

            def draw(stage: str, done: int, total: int) -> None:
                bar.update(task, description=stage, completed=done, total=total, refresh=True)

            yield draw
        return
    stage_start = last_line = last_call = time.monotonic()
    last_done: int | None = None

    def write_line(stage: str, done: int, total: int) -> None:
        nonlocal stage_start, last_line, last_call, last_done
        is_new = last_done is None or done < last_done
        stage_start = last_call if is_new else stage_start
        last_call, last_done = time.monotonic(), done
        if is_new or done == total or last_call - last_line >= LINE_SECONDS:
            last_line = last_call
            seconds = (last_call - stage_start) / max(done, 1) * (total - done)
            duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            tell(f"{stage}: {done} of {total} {noun}" + (f", about {duration} left" if 0 < done < total else ""))

    yield write_line


@contextmanager
def downloads() -> Iterator[PullProgress]:
    """Show on standard error how far a download is: a bar on a terminal, else a line where each stage begins."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False, markup=False)
    stages: list[str] = []
    if not console.is_terminal:

        def write_line(stage: str, done: int, total: int) -> None:
            if stages[-1:] != [stage]:
                stages.append(stage)
                tell(stage)

        yield write_line
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def draw(stage: str, done: int, total: int) -> None:
            # A stage without a total shows a bar of its own, such as pip's.
            bar.update(task, description=stage, completed=done, total=total, visible=total > 0)
            if not total:
                tell(stage)

        yield draw
