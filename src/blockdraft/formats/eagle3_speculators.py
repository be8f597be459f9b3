"""EAGLE-3 drafters in the format of vllm-project/speculators, which `speculators.py` tells of. Its name sorts before
that file's, so it is asked first which folders are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.eagle3 import (
    FLAGS,
    IDS,
    NORMS,
    check_kind,
    checkpoint_of,
    layer_keys,
    network_config,
    renamed,
    written_tensors,
)
from blockdraft.formats.folder import blaming, read_config, read_tensors, write_folder
from blockdraft.formats.speculators_config import ids_of, layer_config, named, taps_of
from blockdraft.nn.eagle3 import BLOCK_SIZE, default_taps

MODEL_TYPE, ARCHITECTURE = "eagle3", "Eagle3Speculator"


def config_dict(config: Any, target_name: str | None, target_architectures: Sequence[str]) -> dict[str, Any]:
    """What config.json holds. Raises ValueError where the format has no words for the configuration."""
    check_kind(config)
    return {
        "architectures": [ARCHITECTURE],
        **named(MODEL_TYPE, config.block_size - 1, target_name, target_architectures),
        "transformer_layer_config": {"model_type": "qwen3" if config.qk_norm else "llama", **layer_keys(config)},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        IDS: ids_of(config),
        **{key: getattr(config, key) for key in (*FLAGS, *NORMS)},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


class Eagle3Speculators:
    borrows = True

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == MODEL_TYPE

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        raw, tensors = read_config(path), renamed(read_tensors(path))
        with blaming(Path(path, "config.json")):
            taps = default_taps(num_target_layers) if raw.get(IDS) is None else taps_of(raw, IDS, num_target_layers)
            own = {key: raw.get(key) for key in (*FLAGS, *NORMS, "draft_vocab_size", "target_hidden_size")}
            layers = {**layer_config(raw.get("transformer_layer_config")), **own}
            config = network_config(layers, tensors, taps, num_target_layers, block_size=_block_size(raw))
        with blaming(Path(path)):
            return checkpoint_of(config, tensors)

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        config_dict(config, target_name, target_architectures)

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        raw = config_dict(checkpoint.config, target_name, target_architectures)
        tensors, dtype = written_tensors(checkpoint.config, checkpoint.tensors)
        found = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        assert checkpoint.borrowed is not None and checkpoint.borrowed.embedding is not None
        found["embed_tokens.weight"] = checkpoint.borrowed.embedding.to(getattr(torch, dtype), copy=True)
        write_folder(path, {**raw, "dtype": dtype}, found, checkpoint.trained_for)


def _block_size(raw: Mapping[str, Any]) -> int:
    """The guesses that the file proposes, with the anchor. It says what paid in training, and no more than a few; the
    drafter can always go on as far as EAGLE-3 does."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    guesses = methods[0].get("speculative_tokens")
    if guesses is not None and type(guesses) is not int:
        raise UsageError(f"speculative_tokens is {guesses!r}; it must be a whole number.")
    return max(BLOCK_SIZE, 1 + (guesses or 0))


LAYOUT = Eagle3Speculators()
