"""GGUF files as targets of the native decoder: configuration, tensors and tokenizer, each from what the file says."""

from __future__ import annotations

from blockdraft.targets.gguf.checkpoint import load_gguf_text, read_gguf

__all__ = ["load_gguf_text", "read_gguf"]
