"""What is settled of a suite: a file that grows by a set at a time, so that a run goes on where it ended."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from blockdraft.data.folder import check_writable, make_folder, read_manifest, write_file
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import shape_name
from blockdraft.evaluation.suite.measure import Row
from blockdraft.evaluation.suite.paper import FIGURES, SOURCE

FORMAT = 1
JSON, CSV = "suite.json", "suite.csv"


@dataclass(frozen=True)
class Results:
    """Attributes:
    asked: What must be the same for all rows, such as the pair and the machine.
    about: Versions, and how the target runs, of the run that settled the last set.
    paper_model: Model of the paper whose figures stand beside ours; None where there is none.
    rows: By set, temperature and method, in the order in which they were settled.
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
        """With the rows of these sets and temperatures alone, in this order."""
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
    """`new` with what the folder holds of it.

    Args:
        overwrite: Begin anew, whatever it holds.

    Raises:
        ValueError: It cannot be written to, its file is broken, or holds results of something else.
    """
    check_writable(folder)
    known = None if overwrite else read_manifest(folder / JSON, FORMAT)
    if known is None:
        return new
    try:
        asked, now = known["asked"], json.loads(json.dumps(new.asked))
        # The file may have former names: of methods, and of `sampled`.
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
    """Write suite.json and suite.csv, each whole or not at all. Raises ValueError where they cannot be written."""
    make_folder(folder)
    write_file(folder / JSON, found.as_json().encode())
    write_file(folder / CSV, found.as_csv().encode())
