"""On-disk formats of drafters, in and out: one file a layout; `base.py` says what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.formats.base import Borrowed, Checkpoint, Layout, check_fits
from blockdraft.formats.find import find_layout, layout_of, layouts
from blockdraft.formats.folder import check_writable, clear_remains, read_config


def read_drafter(path: str | Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
    """Read a folder of any layout. For arguments and errors see `Layout.read`."""
    layout = layout_of(read_config(path))
    if layout is None:
        raise UsageError(f"{Path(path, 'config.json')} is no drafter's; there are {', '.join(layouts())}.")
    return layout.read(Path(path), vocabulary, num_target_layers)


__all__ = ["Borrowed", "Checkpoint", "Layout", "check_fits", "check_writable", "clear_remains", "find_layout"]
__all__ += ["layout_of", "layouts", "read_drafter"]
