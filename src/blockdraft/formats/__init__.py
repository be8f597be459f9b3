"""On-disk formats of drafters, in and out: one file a layout; `base.py` says what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.base import Borrowed, Checkpoint, Layout, check_fits
from blockdraft.plugins import plugins


def layouts() -> dict[str, Layout]:
    """All layouts by name."""
    return {name: module.LAYOUT for name, module in plugins(__name__).items() if hasattr(module, "LAYOUT")}


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


def read_drafter(path: str | Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
    """Read a folder of any layout. For arguments and errors see `Layout.read`."""
    from blockdraft.formats.folder import read_config  # which asks for layouts itself

    layout = layout_of(read_config(path))
    if layout is None:
        raise UsageError(f"{Path(path, 'config.json')} is no drafter's; there are {', '.join(layouts())}.")
    return layout.read(Path(path), vocabulary, num_target_layers)


__all__ = ["Borrowed", "Checkpoint", "Layout", "check_fits", "find_layout", "layout_of", "layouts", "read_drafter"]
