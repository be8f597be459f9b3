"""Drafters, one a file. A file that defines `ARCHITECTURES` and `load` reads checkpoints that name one of these in
their config.json; a file that defines `load_by_name` needs no checkpoint and goes by its file name. Where a drafter
runs a draft network, its file defines `DRAFTER`, the class whose `network_class` says of which kind."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from blockdraft.drafters.base import DIFFUSION_STEPS, NOISE_SCHEDULE, Drafter, NetworkDrafter, State, check_refinement
from blockdraft.errors import UsageError
from blockdraft.targets import Target

BUNDLED = Path(__file__).parents[1] / "pair" / "drafter"


def _modules() -> dict[str, ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]
    return {name: import_module(f"{__name__}.{name}") for name in names}


def load_drafter(path: str | Path | None = None, *, target: Target) -> Drafter:
    """Load the drafter of a target.

    Args:
        path: The folder of a drafter or of a smaller language model with the target's tokens, or the name of a drafter
            that needs no folder ("none" decodes plainly). None is the bundled drafter, which fits the bundled target.
        target: The target that it will draft for; dtype and device are taken from it.

    Raises:
        ValueError: Unknown folder or architecture, unreadable weights, or a drafter of another target.
    """
    folder = BUNDLED if path is None else Path(path)
    modules = _modules()
    by_name = {name for name, module in modules.items() if hasattr(module, "load_by_name")}
    if str(path) in by_name:
        drafter: Drafter = modules[str(path)].load_by_name(target)
        return drafter
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is no drafter: a folder with config.json or one of the names {sorted(by_name)} is needed."
        )
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'} is no JSON object ({error}); fetch or copy it again.") from error
    known = {name: getattr(module, "ARCHITECTURES", ()) for name, module in modules.items()}
    for architecture in found:
        for name, architectures in known.items():
            if architecture in architectures:
                drafter = modules[name].load(folder, target)
                return drafter
    told = ", ".join(f"{name} ({_few(architectures)})" for name, architectures in known.items() if architectures)
    raise UsageError(f"{folder} holds the architecture {found}; the drafters known here are {told}.")


def drafter_of(network: nn.Module, target: Target) -> NetworkDrafter:
    """A drafter that runs this network, which moves to the target's device and dtype.

    Raises:
        UsageError: No drafter runs networks of this class.
    """
    kinds = [module.DRAFTER for module in _modules().values() if hasattr(module, "DRAFTER")]
    for ancestor in type(network).__mro__:  # the closest one that a drafter runs
        for kind in kinds:
            if kind.network_class is ancestor:
                drafter: NetworkDrafter = kind(network, target)
                return drafter
    known = sorted(kind.network_class.__name__ for kind in kinds)
    raise UsageError(f"No drafter runs a {type(network).__name__}; give one of {known} or use load_drafter.")


def _few(names: Sequence[str]) -> str:
    """The names, or the first of them and how many there are where they would fill the screen."""
    return ", ".join(names) if len(names) <= 5 else f"{names[0]} and {len(names) - 1} more"


__all__ = [
    "DIFFUSION_STEPS",
    "NOISE_SCHEDULE",
    "Drafter",
    "NetworkDrafter",
    "State",
    "check_refinement",
    "drafter_of",
    "load_drafter",
]
