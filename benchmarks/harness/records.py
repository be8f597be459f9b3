"""Measurements in a CSV file, one line each, appended as they come, so that an interrupted run resumes."""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints


class Record(Protocol):
    """A frozen dataclass of int, float and str fields (texts without line breaks).

    Attributes:
        KEY: Names of the fields that identify a measurement.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    KEY: ClassVar[tuple[str, ...]]


R = TypeVar("R", bound=Record)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, or none if it does not exist. A last line without an end is removed."""
    if not path.exists():
        return []
    *complete, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
    return complete


class Records(Generic[R]):
    """All measurements of a CSV file, which the first one creates.

    Attributes:
        all: Measurements, in the order of the file.
        had: Their keys.
    """

    def __init__(self, kind: type[R], path: Path) -> None:
        self.path, self._kind = path, kind
        types = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
        lines = csv.DictReader(whole_lines(path))
        self.all = [kind(**{name: read(line[name]) for name, read in types.items()}) for line in lines]
        self.had = set(map(self._key, self.all))

    def add(self, *records: R) -> None:
        """Append those that are not there yet, all at once."""
        new = [record for record in records if self._key(record) not in self.had]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self.all:
            writer.writerow(field.name for field in fields(self._kind))
        writer.writerows(map(astuple, new))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self.all else "w", encoding="utf-8") as file:
            file.write(text.getvalue())
        self.all += new
        self.had.update(map(self._key, new))

    def _key(self, record: R) -> tuple[Any, ...]:
        return tuple(getattr(record, name) for name in self._kind.KEY)
