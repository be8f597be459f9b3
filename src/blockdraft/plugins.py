"""Plugins of other packages, found through entry points, and the modules of all kinds of drafters.

docs/plugins.md documents the groups of entry points. A module is imported when it is first used.
"""

from __future__ import annotations

import logging
import pkgutil
import re
import shlex
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

COMMANDS, DRAFTERS, TARGETS, PAGES, RECORDERS = (
    f"blockdraft.{kind}" for kind in ("commands", "drafters", "targets", "pages", "recorders")
)

# What this project's other packages bring, for messages about what is not installed.
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "blockdraft-tools": {COMMANDS: ("inspect", "quantize", "export")},
    "blockdraft-bench": {COMMANDS: ("bench", "bench server", "calibrate")},
    "blockdraft-compat": {},
    "blockdraft-medusa": {
        DRAFTERS: ("medusa", "MedusaModel", "medusa_num_heads"),  # the last is a key of files that name no architecture
        "blockdraft_train.variants": ("medusa",),
    },
    "blockdraft-train": {
        COMMANDS: ("fit", "prompts", "data", "hidden-states", "train", "doctor"),
        RECORDERS: ("folder",),
    },
    "blockdraft-diffusion": {
        COMMANDS: ("diffusion",),
        DRAFTERS: ("block_diffusion", "flow", "FlowMapDraftModel", "A2DQwen3LMHeadModel", "BD3LM"),
        "blockdraft_train.variants": ("flow",),
    },
    "blockdraft-radar": {COMMANDS: ("radar",)},
    "blockdraft-jax": {TARGETS: ("jax",)},
    "blockdraft-mlx": {TARGETS: ("mlx",)},
}

CLONED = Path(__file__).parents[2] / "packages"  # in a clone, the other packages

# This package's kinds of drafters: a module that ends in `DRAFTER`, or a package with a module for each part.
KINDS = {
    name: f"blockdraft.drafters.{name}"
    for name in (
        "dflash",
        "dflash2",
        "dspark",
        "eagle3",
        "hybrid",
        "lookup",
        "mtp",
        "none",
        "draft_lm",  # last, since it imports transformers for the names of its architectures
    )
}


@cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name, sorted. If two packages use one name, the first package has it."""
    named: dict[str, metadata.EntryPoint] = {}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, _package(entry))):
        first = named.setdefault(entry.name, entry)
        if _package(first) != _package(entry):
            log.warning(
                "%s and %s both bring %r (%s); that of %s is used. Uninstall one of them.",
                _package(first), _package(entry), entry.name, group, _package(first),
            )  # fmt: skip
    return named


@cache
def load(group: str, name: str) -> Any:
    """Import what an entry point names. Return None, after a warning that names the plugin, if that fails."""
    entry = entry_points(group)[name]
    try:
        return entry.load()
    except Exception as error:  # a plugin may raise anything, and must not stop the others
        log.warning(
            "The plugin %r of %s (%s) cannot be loaded and is left out: %s: %s",
            name, _package(entry), group, type(error).__name__, error,
        )  # fmt: skip
        return None


def load_all(group: str) -> dict[str, Any]:
    """Import what all entry points of a group name, by name, without those that cannot be imported."""
    loaded = {name: load(group, name) for name in entry_points(group)}
    return {name: value for name, value in loaded.items() if value is not None}


def install_hint(group: str, name: str, cloned: Path = CLONED) -> str | None:
    """Return the command that installs the package of this project with a plugin, or None if no package has it.

    In a clone, where `cloned` is the folder of the other packages, it names their folders.
    """
    package = next((package for package, groups in PACKAGES.items() if name in groups.get(group, ())), None)
    if package is None:
        return None
    if not cloned.is_dir():
        return f"pip install {package}"
    return shlex.join(["pip", "install", *(word for folder in _folders(package, cloned) for word in ("-e", folder))])


def packages() -> list[str]:
    """Return the names of the installed packages that extend this one: this project's own, then plugins of others."""
    ours = [name for name in PACKAGES if find_spec(name.replace("-", "_"))]
    groups = (COMMANDS, DRAFTERS, TARGETS, PAGES, RECORDERS)
    return list(dict.fromkeys(ours + [_package(entry) for group in groups for entry in entry_points(group).values()]))


def missing_commands() -> dict[str, tuple[str, ...]]:
    """Return the commands of this project's packages that are not installed, by package."""
    commands = {package: groups.get(COMMANDS, ()) for package, groups in PACKAGES.items()}
    found = entry_points(COMMANDS).keys()
    return {package: names for package, names in commands.items() if names and found.isdisjoint(names)}


def _folders(package: str, cloned: Path) -> list[str]:
    """Return the folders in a clone of the packages that a package takes, and last its own."""
    own = cloned / package.removeprefix("blockdraft-")
    taken = re.findall(r'"(blockdraft-\w+)==', (own / "pyproject.toml").read_text())
    return list(dict.fromkeys([*(folder for other in taken for folder in _folders(other, cloned)), str(own)]))


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def kind_modules() -> dict[str, str]:
    """Return the name of the module or package of each kind of drafter, by the name of the kind."""
    return {name: entry.module for name, entry in entry_points(DRAFTERS).items()} | KINDS


def _kinds() -> dict[str, ModuleType]:
    """Import the module or package of each kind of drafter. This package's own precede plugins of the same name."""
    return load_all(DRAFTERS) | {name: import_module(module) for name, module in KINDS.items()}


def drafter_modules() -> dict[str, ModuleType]:
    """Import the module of each kind of drafter that ends in `DRAFTER`, by the name of the kind."""
    return {n: module for n, module in _kinds().items() if hasattr(module, "DRAFTER")} | parts("drafter")


def part_names(part: str) -> list[str]:
    """Return the kinds of drafters that have a module for this part, such as "layout"."""
    return [name for name, package in _kinds().items() if _has(package, part)]


def parts(part: str) -> dict[str, ModuleType]:
    """Import the modules of all kinds of drafters for this part, by the name of the kind."""
    kinds = _kinds()
    return {name: import_module(f"{kinds[name].__name__}.{part}") for name in part_names(part)}


def _has(package: ModuleType, part: str) -> bool:
    return hasattr(package, "__path__") and find_spec(f"{package.__name__}.{part}") is not None


def plugin_names(package: str) -> list[str]:
    """Return the names of a package's modules and folders except `base`, sorted."""
    return sorted(_module_names(tuple(import_module(package).__path__)))


def plugins(package: str) -> dict[str, ModuleType]:
    """Import the modules of a package, by name."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}


@cache
def _module_names(folders: tuple[str, ...]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(folders) if module.name != "base"]
