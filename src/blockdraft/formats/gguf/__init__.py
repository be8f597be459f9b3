"""GGUF files, the format of llama.cpp: `files.py` reads them, `drafter.py` reads drafters.

`kinds.py` finds the kinds of drafters in the `gguf.py` of their folders. `targets/gguf` converts targets.
"""

from __future__ import annotations

from blockdraft.formats.gguf.blocks import FLOATS, READERS, bytes_held, usual_block
from blockdraft.formats.gguf.files import (
    GGUFFile,
    GGUFTensor,
    gguf_outline,
    is_gguf,
    open_gguf,
    read_header,
    read_values,
)

__all__ = ["FLOATS", "READERS", "GGUFFile", "GGUFTensor", "bytes_held", "gguf_outline", "is_gguf"]
__all__ += ["open_gguf", "read_header", "read_values", "usual_block"]
