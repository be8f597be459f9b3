"""Rotary embeddings of written files: metadata, or a factor for each frequency if metadata cannot express a scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf.rope import IN_FACTORS, WORDS


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
