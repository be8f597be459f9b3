"""What a drafter is taught, one objective a file. A recipe names them by file name and mixes them by weight."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from blockdraft.errors import UsageError
from blockdraft.plugins import plugin_names
from blockdraft.training.objectives.base import Objective, Slots, default_gamma, slot_weights


def objective_names() -> list[str]:
    return plugin_names(__name__)


def find_objective(name: str) -> Objective:
    """The objective of this name. Raises ValueError where there is none."""
    if name not in objective_names():
        raise UsageError(f"The objective {name!r} is unknown; there are {', '.join(objective_names())}.")
    return cast(Objective, import_module(f"{__name__}.{name}"))


__all__ = ["Objective", "Slots", "default_gamma", "find_objective", "objective_names", "slot_weights"]
