"""Checkpoints of the families that our own decoder knows, opened to be read a tensor at a time, as when they are to be
written anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.utils.hub import cached_file

from blockdraft.errors import UsageError
from blockdraft.formats.stored import Stored
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.base import LoadOptions
from blockdraft.targets.checkpoint import checked_folder, loading
from blockdraft.targets.families import NotCovered, decoder_config, text_part
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.native_files import open_weights

COMPANIONS = (  # files of a checkpoint that are not its weights
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
READ = "read"  # what may be done to every checkpoint


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are read one at a time.

    Attributes:
        config: As transformers reads it.
        raw: What config.json holds.
        files: Its other files, such as those of the tokenizer.
        source_fingerprint: Of its weights, or with an adapter of those that this was made for.
    """

    wanted: DecoderConfig
    config: PretrainedConfig
    raw: dict[str, Any]
    tensors: Mapping[str, Stored]
    files: Sequence[Path]
    source_fingerprint: str


@contextmanager
def open_checkpoint(
    path: str | Path, revision: str | None = None, adapter: str | Path | None = None, doing: str = "rounded"
) -> Iterator[OpenCheckpoint]:
    """A checkpoint of a family that the native decoder knows, on the CPU, without reading its weights whole.

    Args:
        doing: What is to be done to it, for messages.

    Raises:
        UsageError: The decoder does not know it, it is quantised already, or as in `load_target`.
    """
    checked_folder(path, revision)
    with loading(path):
        config = AutoConfig.from_pretrained(path, revision=revision)
        optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "revision": revision}
        found = [cached_file(path, name, **optional) for name in ("config.json", *COMPANIONS)]
    if few := getattr(config, "quantization_config", None):
        raise UsageError(
            f"{path} is quantised already ({few.get('quant_method')}); give the model that it was made of."
        )
    config = text_part(config)
    options = LoadOptions(torch.float32, torch.device("cpu"), "off", revision=revision, adapter=adapter)
    try:
        wanted = decoder_config(config)
        tensors, source = open_weights(path, wanted, config, options)
    except NotCovered as refused:
        raise UsageError(f"{path} cannot be {doing}, because the native decoder cannot run it: {refused}.") from refused
    if wanted.torch_only and doing != READ:
        raise UsageError(f"{path} cannot be {doing}: it has {wanted.torch_only}, which only decoding knows.")
    raw = json.loads(Path(str(found[0])).read_text(encoding="utf-8"))
    with loading(path):
        if source is None:
            source = weights_fingerprint((name, tensors[name].tensor()) for name in wanted.tensor_shapes())
    yield OpenCheckpoint(wanted, config, raw, tensors, [Path(file) for file in found[1:] if file is not None], source)
