"""Plug-ins found by their place: modules of a package, or folders of it with a file for each part.

All folders of the package's `__path__` are searched, so others can be added. Modules named `base` are no plug-ins.
Folders are listed once in a process, because loading a model asks for plug-ins many times.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

DRAFTERS = "blockdraft.drafters"


def plugin_names(package: str) -> list[str]:
    """Names of a package's modules and folders but `base`, sorted."""
    return sorted(_modules(package))


def plugins(package: str) -> dict[str, ModuleType]:
    """Imported modules of a package by name."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}


def part_names(part: str) -> list[str]:
    """Names of the drafters' folders that have a file for this part, such as "train"."""
    folders = [name for name, is_folder in _modules(DRAFTERS).items() if is_folder]
    return sorted(name for name in folders if part in _modules(f"{DRAFTERS}.{name}"))


def parts(part: str) -> dict[str, ModuleType]:
    """Imported files of the drafters' folders for this part, by the folder's name."""
    return {name: import_module(f"{DRAFTERS}.{name}.{part}") for name in part_names(part)}


def _modules(package: str) -> dict[str, bool]:
    """Modules and folders of a package but `base`, and whether each is a folder."""
    return _listed(tuple(import_module(package).__path__))


@cache
def _listed(folders: tuple[str, ...]) -> dict[str, bool]:
    return {file.name: file.ispkg for file in pkgutil.iter_modules(folders) if file.name != "base"}
