"""Writer of GGUF files of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf, write_gguf
from blockdraft.formats.gguf.rope import IN_FACTORS
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.base import NotCovered
from blockdraft.targets.families import decoder_config
from blockdraft.targets.gguf.config import ARCHITECTURES, differences, gguf_config, gguf_metadata
from blockdraft.targets.gguf.tensors import fitted, gguf_tensors
from blockdraft.targets.weights import OpenCheckpoint
from blockdraft.types import GGUFWeights


def gguf_architecture(source: OpenCheckpoint) -> str:
    """Return the architecture of a target in llama.cpp."""
    return ARCHITECTURES[source.config.model_type]


def write_gguf_target(path: Path, source: OpenCheckpoint, tokenizer: Mapping[str, Any], weights: GGUFWeights) -> None:
    """Write a target to a GGUF file, with one tensor at a time in memory.

    Args:
        path: File to write.
        source: The target's checkpoint.
        tokenizer: Metadata of the tokenizer and other values for the file.
        weights: As in `formats.gguf.write_gguf`.

    Raises:
        UsageError: GGUF cannot describe all settings of the model, or as in `formats.gguf.write_gguf`.
    """
    name, config = gguf_architecture(source), source.config
    values = {f"{name}.{key}": value for key, value in gguf_metadata(config, source.wanted).items()}
    rope = config.rope_parameters
    by_factors = rope.get("rope_type") in IN_FACTORS
    tensors = gguf_tensors(name, source.wanted, source.tensors, float(rope["rope_theta"]) if by_factors else None)
    write_gguf(path, name, {**tokenizer, **values}, tensors, weights)
    _check(path, source.wanted)


def _check(path: Path, wanted: DecoderConfig) -> None:
    """Raise a UsageError unless a file is read back as this decoder."""
    file, wrong = open_gguf(path), ""
    try:
        actual = fitted(decoder_config(gguf_config(file)), file)
    except NotCovered as refused:
        wrong = str(refused)
    else:
        other = differences(actual, replace(wanted, norm_plus_one=False))  # the one is added to the weights
        wrong = f"it would lose {', '.join(other)}" if other else ""
    if wrong:
        raise UsageError(f"The target cannot be written as a GGUF file, which cannot describe it: {wrong}.")
