"""Rows of the list of models: projections by model, device and weights, and the commands that run them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.models import known
from blockdraft.models.catalogue import BUNDLED
from blockdraft_radar.calibrated import calibrated
from blockdraft_radar.devices import Machine
from blockdraft_radar.project import Projection, project
from blockdraft_radar.shape import Shape

USUAL = ("bf16", "Q8_0", "Q4_K_M")  # weights to try unless some are named


def rows_of(
    shape: Shape, machine: Machine, weights: Sequence[str], context: int, batch: int, task: str
) -> Iterator[Projection]:
    """Yield projections with each kind of weights: those given, those of the model's file, or `USUAL`.

    Raises:
        UsageError: As `project` raises it.
    """
    for kind in weights or (["file"] if shape.stored_bytes else USUAL):
        costs, drafter = (calibrated(shape, kind) if machine.measured else None) or (None, None)
        yield project(shape, machine, kind, context, batch, task, drafter=drafter, costs=costs)


def finest(rows: Iterable[Projection]) -> list[Projection]:
    """Return one row for each model and device: the first that fits, or else the last."""
    best: dict[tuple[str, str], Projection] = {}
    for row in rows:
        current = best.get((row.model, row.device))
        if current is None or not current.fits:
            best[row.model, row.device] = row
    return list(best.values())


def largest_first(rows: Iterable[Projection]) -> list[Projection]:
    """Return rows in the order of the list: those that fit, the largest models first, then the others."""
    return sorted(rows, key=lambda row: (not row.fits, -_parameters(row), -fastest(row)))


def _parameters(row: Projection) -> int:
    with suppress(UsageError):
        return known(row.model).parameters or 0
    return 0


def fastest(row: Projection) -> float:
    """Return the likely tokens per second, drafted or plain; 0 if the model does not fit."""
    if not row.fits:
        return 0.0
    return max(row.plain.mid, row.drafted.mid if row.drafted else 0.0)


def with_commands(row: Projection) -> dict[str, Any]:
    """Return a row as `--json` prints it, with the commands that run what it shows."""
    entry = row.as_dict()
    entry["why"]["commands"] = commands(row)
    return entry


def commands(row: Projection) -> list[str]:
    """Return the commands that run what a row shows, here and in other engines."""
    model = None
    with suppress(UsageError):
        model = known(row.model)
    name, hub = (model.id, model.hub) if model else (row.model, row.model)
    lines = [["blockdraft", "pull", name]] if model else []
    drafter = "none" if row.why["drafting"] == "loses" else row.why["drafter"] or "none"
    size = [] if drafter == "none" else ["--block-size", str(row.block_size)]
    lines.append(["blockdraft", "serve", "--target", name, "--drafter", drafter, *size])
    served = row.weights in ("bf16", "fp8", "int8", "int4") and not row.device.startswith("Apple")
    if served and drafter not in ("none", BUNDLED):
        lines.append(["blockdraft", "inspect", drafter, "--target", hub])  # prints the command for each engine
    if row.model.lower().endswith(".gguf"):
        lines.append(["llama-server", "-m", row.model, "-c", str(row.context)])
    return [shlex.join(line) for line in lines]
