"""Packages whose files are plug-ins: each goes by its file name, and `base` says what it must hold.

Files are looked for wherever the package's `__path__` leads, so another folder can be added to it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def plugin_names(package: str) -> list[str]:
    return sorted(file.name for file in pkgutil.iter_modules(import_module(package).__path__) if file.name != "base")


def plugins(package: str) -> dict[str, ModuleType]:
    """All of them, imported."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}
