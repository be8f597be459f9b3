"""The radar page: one self-contained HTML file. It asks the server for projections, or holds those of an export."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from blockdraft.errors import UsageError
from blockdraft.models import known
from blockdraft_radar.devices import DEFAULT_RAM_GB, Machine, devices, find, machine_of
from blockdraft_radar.drafting import TASKS, checked_task
from blockdraft_radar.project import Projection
from blockdraft_radar.rows import finest, largest_first, rows_of, with_commands
from blockdraft_radar.shape import known_shapes, shape_of_config
from blockdraft_radar.step import BITS

NAME = "index.html"


class Query(BaseModel):
    """What the page asks for.

    Attributes:
        device: Name of a device, of which there are `count`.
        ram: Memory in GB of a CPU, or of a chip that shares it.
        weights: Kind of weights; by default the finest of the usual ones that fit.
        context, batch, task: As in `project`.
        config: A `config.json` of the user's own model, shown as `name`.
    """

    model_config = ConfigDict(extra="forbid")

    device: str
    count: int = 1
    ram: float | None = None
    weights: str | None = None
    context: int = 4096
    batch: int = 1
    task: str = "mean"
    config: Any = None
    name: str = "config.json"


def answer(query: Query) -> dict[str, Any]:
    """Return the rows that the page shows, as JSON objects: the user's own model first, then the catalogue.

    Raises:
        UsageError: A value is unknown or out of range, or the configuration is not a language model's.
    """
    checked_task(query.task)
    machine = machine_of(find(query.device), query.count, query.ram)
    own = None
    if query.config is not None:
        if not isinstance(query.config, dict):
            raise UsageError(f"{query.name} is not a JSON object; give the config.json of a language model.")
        own = shape_of_config(query.config, query.name)
    rows, short = [], []
    for shape in [*([own] if own else []), *known_shapes()]:
        if shape.context and query.context > shape.context:
            short.append({"model": shape.name, "licence": shape.licence})
            continue
        weights = [query.weights] if query.weights else []
        [row] = finest(rows_of(shape, machine, weights, query.context, query.batch, query.task))
        rows.append(row)
    return _answer(machine, rows, short, own.name if own else None)


def _answer(
    machine: Machine, rows: Iterable[Projection], short: Sequence[dict[str, Any]] = (), own: str | None = None
) -> dict[str, Any]:
    rows = sorted(largest_first(rows), key=lambda row: row.model != own)
    return {
        "device": machine.name,
        "memory_gb": machine.memory_gb,
        "rows": [{**with_commands(row), "licence": _licence(row.model), "own": row.model == own} for row in rows],
        "short": list(short),
    }


def _licence(name: str) -> str | None:
    try:
        return known(name).licence
    except UsageError:
        return None


@cache
def page() -> str:
    """Return the HTML page that asks the server."""
    machines = [machine_of(device) for device in devices()]
    return _page(machines, None)


def _page(machines: Iterable[Machine], answers: dict[str, Any] | None) -> str:
    data = {
        "machines": [{"name": m.name, "kind": m.kind, "memory_gb": m.memory_gb} for m in machines],
        "weights": list(BITS),
        "tasks": TASKS,
        "ram": DEFAULT_RAM_GB,
        "answers": answers,
    }
    text = files(__name__).joinpath(NAME).read_text(encoding="utf-8")
    return text.replace("/*DATA*/", json.dumps(data).replace("</", "<\\/"))


def export_page(folder: Path, machines: Sequence[Machine], rows: Sequence[Projection]) -> Path:
    """Write a page that holds these rows to a folder, and return the file. It needs no server.

    Raises:
        UsageError: The folder cannot be written to.
    """
    answers = {
        machine.name: _answer(machine, finest(row for row in rows if row.device == machine.name))
        for machine in machines
    }
    file = folder / NAME
    partial = folder / f".{NAME}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(_page(machines, answers), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}); give another folder.") from error
    return file
