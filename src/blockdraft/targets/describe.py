"""Descriptions of targets from headers and small files, without their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.stored import open_tensors
from blockdraft.models import located
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.base import NotCovered, TargetText
from blockdraft.targets.checkpoint import checked_folder, load_text, loading
from blockdraft.targets.families import decoder_config, text_part
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.gguf import load_gguf_text
from blockdraft.targets.gguf.checkpoint import understanding
from blockdraft.targets.gguf.config import gguf_config
from blockdraft.targets.gguf.tensors import decoder_weights, fitted
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.targets.weights import SOURCE, open_weights, weight_files
from blockdraft.types import LoadOptions


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a target.

    Attributes:
        path: Folder, hub name or file.
        config: Configuration of its text model in transformers.
        text: Its tokenizer and limits.
        few_bits: Quantization settings in its configuration, if it is quantized.
        kinds: Number of values by tensor type.
        bytes: Size of its weight files; 0 if they are not in safetensors.
        wanted: Configuration of the native decoder, if that runs it.
        reason: Why the native decoder does not run it, if so.
        fingerprint: Function that reads the weights and returns the fingerprint that drafters carry, if known.
    """

    path: str
    config: AnyConfig
    text: TargetText
    few_bits: Mapping[str, Any] | None
    kinds: Mapping[str, int]
    bytes: int
    wanted: DecoderConfig | None
    reason: str | None
    fingerprint: Callable[[], str | None]


def describe_target(path: str | Path, revision: str | None = None) -> Description:
    """Describe a target by its headers and small files.

    Args:
        path: A model folder, hub name or GGUF file.

    Raises:
        UsageError: There is no such folder, hub name or file, or a file cannot be read.
    """
    path = located(path)
    if is_gguf(path):
        text = load_gguf_text(path, revision)
        file = open_gguf(path)
        with understanding(path):
            config = gguf_config(file)
        kinds = _counted((tensor.kind, tensor.shape) for tensor in file.tensors.values())
        size, few = sum(part.stat().st_size for part in file.parts), None
    else:
        checked_folder(path, revision)
        with loading(path):
            config = load_config(path, revision)
            files = weight_files(path, revision)
            kinds = _counted((tensor.kind, tensor.shape) for tensor in open_tensors(files).values())
            size = sum(Path(file).stat().st_size for file in files)
        text, few = load_text(path, revision), getattr(config, "quantization_config", None)
    wanted, reason = None, None
    try:
        wanted = decoder_config(config)
    except NotCovered as refused:
        reason = str(refused)

    def fingerprint() -> str | None:
        if few:
            return str(few.get(SOURCE) or "") or None
        if wanted is None or not size:
            return None
        if is_gguf(path):
            file = open_gguf(path)
            with understanding(path):
                return decoder_weights(file, fitted(wanted, file)).fingerprint()
        try:
            tensors, _ = open_weights(path, wanted, text_part(config), LoadOptions(revision=revision))
        except NotCovered:  # its tensors have other names
            return None
        with loading(path):
            return weights_fingerprint((name, tensors[name].tensor()) for name in wanted.tensor_shapes())

    return Description(
        path=str(path),
        config=config.get_text_config(),
        text=text,
        few_bits=few,
        kinds=kinds,
        bytes=size,
        wanted=wanted,
        reason=reason,
        fingerprint=fingerprint,
    )


def _counted(tensors: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind, shape in tensors:
        counts[kind] = counts.get(kind, 0) + math.prod(shape)
    return counts
