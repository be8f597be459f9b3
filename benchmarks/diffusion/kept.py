"""Figures that are kept as they come, so that a process that is killed loses none."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

T = TypeVar("T")


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, which may not exist. What was cut off in the middle of a line is taken from the file."""
    if not path.exists():
        return []
    *complete, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
    return complete


class Kept(Generic[T]):
    """A CSV file with a line for each measurement.

    Args:
        kind: A dataclass of whole numbers, numbers and texts without line breaks.
        key: How many of its first fields say which measurement it is.

    Attributes:
        all: What the file holds.
    """

    def __init__(self, path: Path, kind: type[T], key: int) -> None:
        self.path, self._key = path, key
        self._columns = get_type_hints(kind)
        self.all: list[T] = [
            kind(**{name: read(line[name]) for name, read in self._columns.items()})
            for line in csv.DictReader(whole_lines(path))
        ]
        self._had = {self._key_of(row) for row in self.all}

    def had(self, *key: Any) -> bool:
        return key in self._had

    def add(self, rows: Iterable[T]) -> None:
        rows, text = list(rows), io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self.all:
            writer.writerow(self._columns)
        writer.writerows(astuple(row) for row in rows)  # type: ignore[call-overload]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self.all else "w", encoding="utf-8") as file:
            file.write(text.getvalue())
        self.all += rows
        self._had |= {self._key_of(row) for row in rows}

    def _key_of(self, row: T) -> tuple[Any, ...]:
        return astuple(row)[: self._key]  # type: ignore[call-overload,no-any-return]
