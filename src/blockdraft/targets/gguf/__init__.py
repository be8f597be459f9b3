"""GGUF files of targets, read for the native decoder and written: configuration, tensors and tokenizer."""

from __future__ import annotations

from blockdraft.targets.gguf.checkpoint import load_gguf_text, open_gguf_checkpoint, read_gguf
from blockdraft.targets.gguf.config import causal_lm
from blockdraft.targets.gguf.head import has_head, read_gguf_head
from blockdraft.targets.gguf.tokenizer_metadata import tokenizer_metadata
from blockdraft.targets.gguf.write import gguf_architecture, write_gguf_target

__all__ = [
    "causal_lm",
    "gguf_architecture",
    "has_head",
    "load_gguf_text",
    "open_gguf_checkpoint",
    "read_gguf",
    "read_gguf_head",
    "tokenizer_metadata",
    "write_gguf_target",
]
