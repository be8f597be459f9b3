"""A suite's table: ours, and the paper's beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean

from rich import box
from rich.console import Console
from rich.table import Table

from blockdraft.evaluation.methods import PLAIN, shape_name
from blockdraft.evaluation.suite.measure import Row
from blockdraft.evaluation.suite.paper import FIGURES, SOURCE, Published
from blockdraft.evaluation.suite.results import Results
from blockdraft.evaluation.suite.tasks import Task

NOTES = (
    "Cells: speed-up over plain decoding/tau, tokens of a cycle. Both are means over answers, and the last line is "
    "over sets (of speed-ups the geometric mean), as the paper has them. same: answers identical to those of plain "
    "decoding, of the method with the fewest. loops: plain answers in which a run of 8 tokens occurs 4 times or more; "
    "they are easy to guess, and count here."
)


def show(console: Console, found: Results, tasks: Sequence[Task]) -> None:
    """Print a table for each temperature.

    Args:
        tasks: Whose sets are shown.
    """
    for temperature in dict.fromkeys(row.temperature for row in found.rows):
        rows = {(row.task, row.method): row for row in found.rows if row.temperature == temperature}
        published = FIGURES.get(found.paper_model or "", {}).get(temperature, {})
        shown = [task for task in tasks if (task.name, PLAIN) in rows]
        console.print(_table(temperature, shown, rows, published, box.SIMPLE if console.is_terminal else None))
        console.print()
    about = found.about
    console.print(f"Ours: {about['running']}, {about['dtype']}, {about['machine']}. {NOTES}")
    if found.paper_model is None:
        console.print(f"The paper has no figures for this target; --paper-model {'|'.join(FIGURES)} shows one's.")
    else:
        console.print(f"The paper's figures: {found.paper_model}, {SOURCE}.")


def _table(
    temperature: float,
    tasks: Sequence[Task],
    rows: Mapping[tuple[str, str], Row],
    published: Mapping[str, Mapping[str, Published]],
    lines: box.Box | None,
) -> Table:
    methods = [method for method in dict.fromkeys(method for _, method in rows) if method != PLAIN]
    table = Table(box=lines, pad_edge=False, title_justify="left", title=f"Temperature {temperature:g}")
    table.add_column("set", no_wrap=True)
    table.add_column("prompts", justify="right")
    for method in methods:
        table.add_column(shape_name(method), justify="right", overflow="fold")
    for header in ("same %", "loops %", *(f"paper:\n{method}" for method in published)):
        table.add_column(header, justify="right")
    columns = {method: {task.name: rows[task.name, method] for task in tasks} for method in methods}
    for task in tasks:
        shares = [row.identical for (name, _), row in rows.items() if name == task.name and row.identical is not None]
        plain = rows[task.name, PLAIN]
        table.add_row(
            task.title,
            str(plain.prompts),
            *(_cell(column[task.name]) for column in columns.values()),
            _percent(min(shares)),
            _percent(plain.looping),
            *(_cell(row.get(task.name)) for row in published.values()),
        )
    compared = [task.name for task in tasks if all(task.name in row for row in published.values())]
    if len(compared) > 1:
        table.add_section()
        ours, theirs = (
            [_mean([row[name] for name in compared]) for row in each.values()] for each in (columns, published)
        )
        whole = len(compared) == len(tasks)
        table.add_row("mean" if whole else "mean, paper's sets", "", *ours, "", "", *theirs)
    return table


def _cell(one: Row | Published | None) -> str:
    return "-" if one is None or one.speedup is None or one.tau is None else f"{one.speedup:.2f}/{one.tau:.2f}"


def _mean(cells: Sequence[Row | Published]) -> str:
    known = [(one.speedup, one.tau) for one in cells if one.speedup is not None and one.tau is not None]
    if not known:
        return "-"
    return f"{geometric_mean([speedup for speedup, _ in known]):.2f}/{fmean(tau for _, tau in known):.2f}"


def _percent(share: float) -> str:
    return f"{int(1000 * share) / 10:g}"  # rounded down, so that 100 means all
