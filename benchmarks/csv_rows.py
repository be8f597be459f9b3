"""Figures in a CSV file, a line each, so that an interrupted run goes on."""

from __future__ import annotations

import csv
from collections.abc import Hashable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints


class Row(Protocol):
    """A frozen dataclass of int, float and str fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Hashable:
        """What there is one line of."""


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """All lines so far.

    Args:
        kind: Of the lines.
        path: Of the file, which is made if need be.
    """

    def __init__(self, kind: type[R], path: Path) -> None:
        self.path = path
        kinds = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(kinds) + "\n", encoding="utf-8")
        *complete, rest = path.read_text(encoding="utf-8").split("\n")
        if rest:  # cut off in the middle of a line
            path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
        lines = csv.DictReader(complete)
        self.all = [kind(**{name: of(line[name]) for name, of in kinds.items()}) for line in lines]
        self.had = {row.key for row in self.all}

    def add(self, *rows: R) -> None:
        """Write those that are not there yet, all at once."""
        new = [row for row in rows if row.key not in self.had]
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(asdict(row).values() for row in new)
        self.all += new
        self.had |= {row.key for row in new}
