"""Which layouts there are, and which one a folder has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.base import Layout
from blockdraft.plugins import plugins


def layouts() -> dict[str, Layout]:
    """All layouts by name."""
    return {name: module.LAYOUT for name, module in plugins("blockdraft.formats").items() if hasattr(module, "LAYOUT")}


def find_layout(name: str) -> Layout:
    """The layout of this name. Raises ValueError where there is none."""
    if name not in layouts():
        raise UsageError(f"format is {name!r}; it must be one of {', '.join(sorted(layouts(), reverse=True))}.")
    return layouts()[name]


def layout_of(raw: Any) -> Layout | None:
    """The layout of a parsed config.json; None where it is no drafter's."""
    if not isinstance(raw, Mapping):
        return None
    return next((layout for layout in layouts().values() if layout.recognises(raw)), None)
