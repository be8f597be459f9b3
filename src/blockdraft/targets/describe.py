"""Descriptions of targets from headers and small files, without their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.formats.gguf import GGUFFile, gguf_outline, is_gguf
from blockdraft.formats.stored import TensorFiles
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
from blockdraft.targets.weights import SOURCE, open_files, open_weights
from blockdraft.types import LoadOptions


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a target.

    Attributes:
        path: Folder, hub name or file.
        config: Configuration of its text model in transformers.
        text: Its tokenizer and limits.
        few_bits: Quantization settings in its configuration, if it is quantized.
        weights: Its tensors; none if they are not in safetensors.
        wanted: Configuration of the native decoder, if that runs it.
        reason: Why the native decoder does not run it, if so.
        fingerprint: Function that reads the weights and returns the fingerprint that drafters carry, if known.
    """

    path: str
    config: AnyConfig
    text: TargetText
    few_bits: Mapping[str, Any] | None
    weights: TensorFiles
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
    opened: TensorFiles
    if is_gguf(path):
        text = load_gguf_text(path, revision)
        opened, few = gguf_outline(path), None
        with understanding(path):
            config = gguf_config(opened)
    else:
        checked_folder(path, revision)
        with loading(path):
            config = load_config(path, revision)
        opened = open_files(path, revision)
        text, few = load_text(path, revision), getattr(config, "quantization_config", None)
    wanted, reason = None, None
    try:
        wanted = decoder_config(config)
    except NotCovered as refused:
        reason = str(refused)

    def fingerprint() -> str | None:
        if few:
            return str(few.get(SOURCE) or "") or None
        if wanted is None or not opened.files:
            return None
        if isinstance(opened, GGUFFile):
            with understanding(path):
                return decoder_weights(opened, fitted(wanted, opened)).fingerprint()
        try:
            tensors = open_weights(path, wanted, text_part(config), LoadOptions(revision=revision))[0].tensors
        except NotCovered:  # its tensors have other names
            return None
        with loading(path):
            return weights_fingerprint((name, tensors[name].tensor()) for name in wanted.tensor_shapes())

    return Description(
        path=str(path),
        config=config.get_text_config(),
        text=text,
        few_bits=few,
        weights=opened,
        wanted=wanted,
        reason=reason,
        fingerprint=fingerprint,
    )
