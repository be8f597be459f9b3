"""Rotary embeddings in GGUF files: metadata, or a factor for each frequency if metadata cannot express a scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError

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


def rope_metadata(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata of rotary embeddings by their keys without the architecture.

    Args:
        scaling: `rope_type` and its parameters, as in transformers; None is no scaling.

    Raises:
        UsageError: A GGUF file cannot express the scaling.
    """
    metadata: dict[str, Any] = {"rope.freq_base": float(theta)}
    given = {name: value for name, value in (scaling or {}).items() if value is not None and name != "rope_theta"}
    kind = given.pop("rope_type", "default")
    if kind == "default" or kind in IN_FACTORS:
        return metadata
    unknown = sorted(set(given) - set(WORDS.get(kind, {})))
    if kind not in WORDS or unknown:
        raise UsageError(
            f"The rotary embeddings are scaled by {' with '.join([kind, *unknown])}, which cannot be written to GGUF; "
            f"those scaled by {', '.join([*WORDS, *IN_FACTORS])} can be written."
        )
    words = {f"rope.scaling.{WORDS[kind][name]}": value for name, value in given.items()}
    floats = {key: value if key.endswith("length") else float(value) for key, value in words.items()}
    return metadata | {"rope.scaling.type": kind} | floats


def rope_factors(theta: float, frequencies: Tensor) -> Tensor:
    """Return the factors `[pairs]` float32 by which unscaled frequencies are divided to give these."""
    pairs = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return (theta**-pairs / frequencies.double()).float()


def paired(rows: int, heads: int) -> Tensor:
    """Return the indices that reorder the rows of a projection from a file's order to ours.

    Some architectures of llama.cpp rotate neighbouring channels of a head together; we rotate channels half a head
    apart.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
