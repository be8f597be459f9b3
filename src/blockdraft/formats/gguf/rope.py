"""Rotary embeddings as GGUF files say them: values, and where these do not do, a factor for each frequency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError

ROPE_FACTORS = "rope_freqs.weight"
ROPE_BASE = 10000.0  # llama.cpp's, where a file names none
# What transformers calls the parameters of a scaling, and what llama.cpp does.
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
    """Values by their keys without the architecture.

    Args:
        scaling: `rope_type` and its parameters, as transformers has them; None is none.

    Raises:
        UsageError: llama.cpp has no words for the scaling.
    """
    found: dict[str, Any] = {"rope.freq_base": float(theta)}
    given = {name: value for name, value in (scaling or {}).items() if value is not None and name != "rope_theta"}
    kind = given.pop("rope_type", "default")
    if kind == "default" or kind in IN_FACTORS:
        return found
    unknown = sorted(set(given) - set(WORDS.get(kind, {})))
    if kind not in WORDS or unknown:
        raise UsageError(
            f"The rotary embeddings are scaled by {' with '.join([kind, *unknown])}, for which GGUF has no words here; "
            f"those scaled by {', '.join([*WORDS, *IN_FACTORS])} can be written."
        )
    words = {f"rope.scaling.{WORDS[kind][name]}": value for name, value in given.items()}
    floats = {key: value if key.endswith("length") else float(value) for key, value in words.items()}
    return found | {"rope.scaling.type": kind} | floats


def rope_factors(theta: float, frequencies: Tensor) -> Tensor:
    """What divides the plain frequencies to make these `[pairs]`; the same shape, float32."""
    pairs = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return (theta**-pairs / frequencies.double()).float()


def paired(rows: int, heads: int) -> Tensor:
    """The rows of a projection in our order, where a file's lie in pairs: some architectures of llama.cpp turn
    neighbours of a head's channels together, and we those that are half a head apart."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
