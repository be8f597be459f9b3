"""GGUF files of targets, read for the native decoder: configuration, tensors and tokenizer."""

from __future__ import annotations

from blockdraft.targets.gguf.checkpoint import load_gguf_text, read_gguf
from blockdraft.targets.gguf.config import causal_lm
from blockdraft.targets.gguf.head import has_head, read_gguf_head

__all__ = ["causal_lm", "has_head", "load_gguf_text", "read_gguf", "read_gguf_head"]
