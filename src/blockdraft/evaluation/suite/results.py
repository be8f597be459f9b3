"""Results of a suite: files that grow task by task, so that a run can resume, and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from blockdraft.data.folder import check_writable, make_folder, read_manifest, write_file
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import PLAIN
from blockdraft.evaluation.suite.measure import Row
from blockdraft.evaluation.suite.paper import Task
from blockdraft.evaluation.tables import new_table, percent

FORMAT = 1
JSON = "suite.json"
NOTES = (
    "Cells: speed-up over plain decoding/tau, tokens per target forward pass. Both are means over responses, and the "
    "last line is over tasks (of speed-ups the geometric mean), as in the paper. same: responses identical to those of "
    "plain decoding, for the method with the fewest. loops: plain responses in which a run of 8 tokens occurs at least "
    "4 times; they are easy to draft, and included here."
)


@dataclass(frozen=True)
class Results:
    """Content of suite.json.

    Attributes:
        asked: Conditions that must be equal for all rows, such as the pair and the machine.
        about: Versions and backend of the run that measured the last task.
        rows: Figures by task, temperature and method, in the order of measurement.
    """

    asked: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: tuple[Row, ...] = ()

    def settled(self, task: str, temperature: float) -> bool:
        """Return whether a task has been measured at this temperature."""
        return any((row.task, row.temperature) == (task, temperature) for row in self.rows)

    def plus(self, rows: Sequence[Row]) -> Results:
        return replace(self, rows=(*self.rows, *rows))

    def only(self, tasks: Sequence[str], temperatures: Sequence[float]) -> Results:
        """Return the results with only the rows of these tasks and temperatures, in this order."""
        order = [(task, temperature) for temperature in temperatures for task in tasks]
        return replace(self, rows=tuple(r for key in order for r in self.rows if (r.task, r.temperature) == key))

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


def resumed(new: Results, folder: Path, overwrite: bool) -> Results:
    """Return `new` with the rows that an earlier run has left in a folder.

    Args:
        overwrite: Ignore the rows in the folder.

    Raises:
        UsageError: The folder cannot be written to, its file is broken, or it holds results of another run.
    """
    check_writable(folder)
    known = None if overwrite else read_manifest(folder / JSON, FORMAT)
    if known is None:
        return new
    try:
        asked, now = known["asked"], json.loads(json.dumps(new.asked))
        rows = tuple(Row(**row) for row in known["rows"])
        other = [name for name in {**asked, **now} if asked.get(name) != now.get(name)]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / JSON} cannot be resumed ({error!r}); add --overwrite to start again.") from error
    if other:
        changes = "; ".join(f"{name} was {asked.get(name)!r} and is {now.get(name)!r}" for name in other)
        raise UsageError(f"{folder / JSON} is of another run: {changes}. Choose another --out, or add --overwrite.")
    return replace(new, rows=rows)


def write(folder: Path, results: Results) -> None:
    """Write suite.json completely or not at all. Raise a UsageError if that is not possible."""
    make_folder(folder)
    write_file(folder / JSON, results.as_json().encode())


def show(console: Console, results: Results, tasks: Sequence[Task]) -> None:
    """Print a table of these tasks for each temperature."""
    for temperature in dict.fromkeys(row.temperature for row in results.rows):
        rows = {(row.task, row.method): row for row in results.rows if row.temperature == temperature}
        shown = [task for task in tasks if (task.name, PLAIN) in rows]
        table = _table(console, shown, rows)
        table.title = f"Temperature {temperature:g}"
        console.print(table, "")
    about = results.about
    vocab = f", draft vocabulary {results.asked['draft_vocab']}" if "draft_vocab" in results.asked else ""
    console.print(f"{about['running']}, {about['dtype']}, {about['machine']}{vocab}. {NOTES}")


def _table(console: Console, tasks: Sequence[Task], rows: Mapping[tuple[str, str], Row]) -> Table:
    methods = [method for method in dict.fromkeys(method for _, method in rows) if method != PLAIN]
    headers = "prompts", *methods, "same %", "loops %"
    table = new_table(console, "set", *(f">{header}" for header in headers))
    table.columns[0].no_wrap = True
    columns = {method: {task.name: rows[task.name, method] for task in tasks} for method in methods}
    for task in tasks:
        shares = [row.identical for (name, _), row in rows.items() if name == task.name and row.identical is not None]
        plain = rows[task.name, PLAIN]
        table.add_row(
            task.title,
            str(plain.prompts),
            *(_cell([column[task.name]]) for column in columns.values()),
            percent(min(shares)),
            percent(plain.repetitive),
        )
    if len(tasks) > 1:
        table.add_section()
        table.add_row("mean", "", *(_cell([*column.values()]) for column in columns.values()))
    return table


def _cell(figures: Sequence[Row]) -> str:
    """Return the mean speed-up and tau of one or several tasks."""
    known = [(row.speedup, row.tau) for row in figures if row.speedup is not None and row.tau is not None]
    if not known:
        return "-"
    return f"{geometric_mean([speedup for speedup, _ in known]):.2f}/{fmean(tau for _, tau in known):.2f}"
