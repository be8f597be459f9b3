"""Plug-ins found by their place: modules of a package, or folders of it with a file for each part.

All folders of the package's `__path__` are searched, so others can be added. Modules named `base` are no plug-ins.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

DRAFTERS = "blockdraft.drafters"


def plugin_names(package: str) -> list[str]:
    """Names of a package's modules and folders but `base`, sorted."""
    return sorted(file.name for file in pkgutil.iter_modules(import_module(package).__path__) if file.name != "base")


def plugins(package: str) -> dict[str, ModuleType]:
    """Imported modules of a package by name."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}


def part_names(part: str) -> list[str]:
    """Names of the drafters' folders that have a file for this part, such as "train"."""
    folders = [file.name for file in pkgutil.iter_modules(import_module(DRAFTERS).__path__) if file.ispkg]
    return sorted(name for name in folders if part in plugin_names(f"{DRAFTERS}.{name}"))


def parts(part: str) -> dict[str, ModuleType]:
    """Imported files of the drafters' folders for this part, by the folder's name."""
    return {name: import_module(f"{DRAFTERS}.{name}.{part}") for name in part_names(part)}
