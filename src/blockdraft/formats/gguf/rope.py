"""Rotary embeddings in GGUF files: metadata, or a factor for each frequency if metadata cannot express a scaling."""

from __future__ import annotations

import torch
from torch import Tensor

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # by length of the context
ROPE_BASE = 10000.0  # llama.cpp's default
# llama.cpp's names of the parameters of a scaling, by those of transformers.
WORDS = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
IN_FACTORS = ("llama3",)  # scalings that are written as factors


def paired(rows: int, heads: int) -> Tensor:
    """Return the indices that reorder the rows of a projection from a file's order to ours.

    Some architectures of llama.cpp rotate neighbouring channels of a head together; we rotate channels half a head
    apart.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
