"""Which layouts there are, and which one a folder has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.base import Layout
from blockdraft.plugins import parts, plugins


def layouts() -> dict[str, Layout]:
    """All layouts by name. Those of a single kind of drafter come first: they are asked first whether a folder is
    theirs."""
    found = {name: module.LAYOUT for name, module in parts("layout").items() if hasattr(module, "LAYOUT")}
    found |= {f"{name}_speculators": module.LAYOUT for name, module in parts("speculators").items()}
    shared = plugins("blockdraft.formats")
    return found | {name: module.LAYOUT for name, module in shared.items() if hasattr(module, "LAYOUT")}


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
