"""On-disk formats of drafters, one file per layout. `base.py` defines the protocol of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.formats.base import (
    Borrowed,
    Checkpoint,
    DrafterTarget,
    Layout,
    check_fits,
    find_layout,
    layout_of,
    layouts,
)
from blockdraft.formats.folder import check_writable, read_config, read_folder
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.gguf.drafter import read_gguf_drafter
from blockdraft.formats.trained import Trained


def read_drafter(path: str | Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
    """Read a folder of any layout, or a GGUF file. See `DrafterTarget` and `read_folder`."""
    if is_gguf(path):
        return read_gguf_drafter(path, num_target_layers)
    raw = read_config(path)
    layout = layout_of(raw)
    if layout is None:
        raise UsageError(
            f"{Path(path, 'config.json')} does not describe a drafter; the known layouts are {', '.join(layouts())}."
        )
    return read_folder(path, layout, DrafterTarget(vocabulary=vocabulary, num_layers=num_target_layers))


__all__ = ["Borrowed", "Checkpoint", "Layout", "DrafterTarget", "check_fits", "check_writable", "find_layout"]
__all__ += ["layout_of", "layouts", "read_config", "read_drafter", "Trained"]
