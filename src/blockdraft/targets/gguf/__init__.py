"""GGUF files of targets, read for the native decoder and written: configuration, tensors and tokenizer."""

from __future__ import annotations

from blockdraft.targets.gguf.checkpoint import load_gguf_text, open_gguf_checkpoint, read_gguf
from blockdraft.targets.gguf.config import causal_lm
from blockdraft.targets.gguf.tokenizer_metadata import tokenizer_metadata
from blockdraft.targets.gguf.write import gguf_architecture, write_gguf_target

__all__ = [
    "causal_lm",
    "gguf_architecture",
    "load_gguf_text",
    "open_gguf_checkpoint",
    "read_gguf",
    "tokenizer_metadata",
]
__all__ += ["write_gguf_target"]
