"""Results of a suite: files that grow set by set, so that a run can be resumed, and tables beside the paper's."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from blockdraft.data.folder import check_writable, make_folder, read_manifest, write_file
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import PLAIN, shape_name
from blockdraft.evaluation.suite.measure import Row
from blockdraft.evaluation.suite.paper import FIGURES, SOURCE, Published, Task

FORMAT = 1
JSON, CSV = "suite.json", "suite.csv"
NOTES = (
    "Cells: speed-up over plain decoding/tau, tokens of a cycle. Both are means over answers, and the last line is "
    "over sets (of speed-ups the geometric mean), as the paper has them. same: answers identical to those of plain "
    "decoding, of the method with the fewest. loops: plain answers in which a run of 8 tokens occurs 4 times or more; "
    "they are easy to guess, and count here."
)


@dataclass(frozen=True)
class Results:
    """Results, as suite.json holds them.

    Attributes:
        asked: Conditions that must be the same for all rows, such as the pair and the machine.
        about: Versions and backend of the run that measured the last set.
        paper_model: Model of the paper whose figures are shown too; None if there is none.
        rows: Figures by set, temperature and method, in the order in which they were measured.
    """

    asked: Mapping[str, Any]
    about: Mapping[str, Any]
    paper_model: str | None
    rows: tuple[Row, ...] = field(default=())

    def settled(self, task: str, temperature: float) -> bool:
        return any((row.task, row.temperature) == (task, temperature) for row in self.rows)

    def plus(self, rows: Sequence[Row]) -> Results:
        return replace(self, rows=(*self.rows, *rows))

    def only(self, tasks: Sequence[str], temperatures: Sequence[float]) -> Results:
        """Results with only the rows of these sets and temperatures, in this order."""
        order = [(task, temperature) for temperature in temperatures for task in tasks]
        found = (row for place in order for row in self.rows if (row.task, row.temperature) == place)
        return replace(self, rows=tuple(found))

    def as_json(self) -> str:
        paper = dict(self._published())
        return json.dumps({"format": FORMAT, **asdict(self), "paper": {"source": SOURCE, **paper}}, indent=2) + "\n"

    def as_csv(self) -> str:
        text = io.StringIO()
        table = csv.DictWriter(text, [each.name for each in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(map(asdict, self.rows))
        return text.getvalue()

    def _published(self) -> Iterator[tuple[str, Any]]:
        for temperature, methods in FIGURES.get(self.paper_model or "", {}).items():
            told = {method: {task: asdict(one) for task, one in row.items()} for method, row in methods.items()}
            yield f"temperature {temperature:g}", told


def resumed(new: Results, folder: Path, overwrite: bool) -> Results:
    """`new` with the rows that a folder holds of the same run.

    Args:
        overwrite: Ignore the folder's rows.

    Raises:
        UsageError: The folder cannot be written to, its file is broken, or it holds results of another run.
    """
    check_writable(folder)
    known = None if overwrite else read_manifest(folder / JSON, FORMAT)
    if known is None:
        return new
    try:
        asked, now = known["asked"], json.loads(json.dumps(new.asked))
        # The file may have former names of methods and of `sampled`.
        names = {shape_name(name): name for name in now["methods"]}
        rows = tuple(Row(**row | {"method": _named(row["method"], names)}) for row in known["rows"])
        asked["methods"] = {_named(name, names): how for name, how in asked["methods"].items()}
        for drafting in asked["methods"].values():
            if "drawn" in drafting:
                drafting["sampled"] = drafting.pop("drawn")
        other = [name for name in {**asked, **now} if asked.get(name) != now.get(name)]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder / JSON} cannot be gone on with ({error!r}); add --overwrite to begin anew."
        ) from error
    if other:
        told = "; ".join(f"{name} was {asked.get(name)!r} and is {now.get(name)!r}" for name in other)
        raise UsageError(f"{folder / JSON} is of another run: {told}. Choose another --out, or add --overwrite.")
    return replace(new, rows=rows)


def _named(method: str, names: Mapping[str, str]) -> str:
    return names.get(shape_name(method), method)


def write(folder: Path, found: Results) -> None:
    """Write suite.json and suite.csv, each whole or not at all. Raises a UsageError if they cannot be written."""
    make_folder(folder)
    write_file(folder / JSON, found.as_json().encode())
    write_file(folder / CSV, found.as_csv().encode())


def show(console: Console, found: Results, tasks: Sequence[Task]) -> None:
    """Print a table for each temperature.

    Args:
        tasks: Sets that are shown.
    """
    for temperature in dict.fromkeys(row.temperature for row in found.rows):
        rows = {(row.task, row.method): row for row in found.rows if row.temperature == temperature}
        published = FIGURES.get(found.paper_model or "", {}).get(temperature, {})
        shown = [task for task in tasks if (task.name, PLAIN) in rows]
        console.print(_table(temperature, shown, rows, published, box.SIMPLE if console.is_terminal else None))
        console.print()
    about = found.about
    few = f", draft vocabulary {found.asked['draft_vocab']}" if "draft_vocab" in found.asked else ""
    console.print(f"Ours: {about['running']}, {about['dtype']}, {about['machine']}{few}. {NOTES}")
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
