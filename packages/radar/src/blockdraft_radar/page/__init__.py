"""The radar page: one self-contained HTML file, which computes projections with `projection.js`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from blockdraft.engine.runner import MAX_OWN_NODES
from blockdraft.errors import UsageError
from blockdraft.models import Drafter
from blockdraft_radar.devices import DEFAULT_RAM_GB, LINKED, Machine, devices, machine_of
from blockdraft_radar.drafting import TASKS, cost_for, tau_of
from blockdraft_radar.project import BANDS, LOSES, SHARE, SIZES, WINS
from blockdraft_radar.shape import KEYS_OF_MOE, RECURRENT, Shape, known_shapes
from blockdraft_radar.step import ARITHMETIC, BITS, LINK_US, OF_KERNELS, ON_CPUS, PREFILL_TOKENS, UNPACKING, constants

NAME = "index.html"
NUMBERS = {
    "DEFAULT_RAM_GB": DEFAULT_RAM_GB,
    "LINKED": LINKED,
    "LINK_US": LINK_US,
    "LOSES": LOSES,
    "MAX_OWN_NODES": MAX_OWN_NODES,
    "OF_KERNELS": OF_KERNELS,
    "PREFILL_TOKENS": PREFILL_TOKENS,
    "SHARE": SHARE,
    "UNPACKING": UNPACKING,
    "WINS": WINS,
}


@cache
def page() -> str:
    """Return the HTML page, with all models and devices."""
    folder = files(__name__)
    data = data_of_page(known_shapes(), [machine_of(device) for device in devices()])
    text = folder.joinpath(NAME).read_text(encoding="utf-8")
    text = text.replace("/*PROJECTION*/", folder.joinpath("projection.js").read_text(encoding="utf-8"))
    return text.replace("/*DATA*/", data.replace("</", "<\\/"))


def export_page(folder: Path) -> Path:
    """Write the page to a folder, and return the file.

    Raises:
        UsageError: The folder cannot be written to.
    """
    file = folder / NAME
    partial = folder / f".{NAME}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(page(), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}); give another folder.") from error
    return file


def data_of_page(shapes: Iterable[Shape], machines: Iterable[Machine]) -> str:
    """Return the data of the page as JSON."""
    models = []
    for shape in shapes:
        choices: Sequence[Drafter | None] = shape.drafters or (None,)
        names = [field.name for field in fields(shape) if field.name not in ("drafters", "path")]
        model = {name: getattr(shape, name) for name in names}
        models.append({**model, "drafters": [_drafter_data(drafter) for drafter in choices]})
    return json.dumps(
        {
            "numbers": NUMBERS,
            "bits": BITS,
            "bands": BANDS,
            "arithmetic": ARITHMETIC,
            "on_cpus": ON_CPUS,
            "sizes": SIZES,
            "keys_of_moe": KEYS_OF_MOE,
            "recurrent": sorted(RECURRENT),
            "tasks": TASKS,
            "constants": {name: asdict(constant) for name, constant in constants().items()},
            "machines": [asdict(machine) for machine in machines],
            "models": models,
            "unknown": _drafter_data(None),
        }
    )


def _drafter_data(drafter: Drafter | None) -> dict[str, Any]:
    return {
        "hub": drafter.hub if drafter else None,
        "cost": asdict(cost_for(drafter)),
        "block_size": drafter.block_size if drafter else None,
        "tau": {task: asdict(tau_of(drafter, task)) for task in TASKS},
    }
