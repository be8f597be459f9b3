"""Plug-ins found by where they lie: a module of a package, or a folder of it with one file for each part it plays.

Modules are looked for wherever the package's `__path__` leads, so another folder can be added to it. `base` is none.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

DRAFTERS = "blockdraft.drafters"


def plugin_names(package: str) -> list[str]:
    return sorted(file.name for file in pkgutil.iter_modules(import_module(package).__path__) if file.name != "base")


def plugins(package: str) -> dict[str, ModuleType]:
    """All modules of a package, imported, by name."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}


def part_names(part: str, package: str = DRAFTERS) -> list[str]:
    """The folders of a package that have a file of this name, such as "train"."""
    folders = [file.name for file in pkgutil.iter_modules(import_module(package).__path__) if file.ispkg]
    return sorted(name for name in folders if part in plugin_names(f"{package}.{name}"))


def parts(part: str, package: str = DRAFTERS) -> dict[str, ModuleType]:
    """These files, imported, by the folder's name."""
    return {name: import_module(f"{package}.{name}.{part}") for name in part_names(part, package)}
