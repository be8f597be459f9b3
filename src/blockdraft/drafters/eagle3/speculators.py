"""EAGLE-3 drafters in the format of vllm-project/speculators, which `formats/speculators.py` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockdraft.drafters.eagle3.layout import (
    FLAGS,
    IDS,
    NORMS,
    TABLE,
    EagleLayout,
    check_kind,
    layer_keys,
    least_layers,
    network_config,
    renamed,
    written_tensors,
)
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, Eagle3Config, default_target_layers
from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import write_folder
from blockdraft.formats.speculators_config import draft_tokens_text, ids_of, layer_config, named, target_layers_of
from blockdraft.formats.starting import SGLANG, TENSORRT_LLM, VLLM, Start, vllm_alone
from blockdraft.nn.draft_config import need


def network_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys for `network_config` from a parsed config.json.

    Raises ValueError if the section of the layers is missing.
    """
    own = {key: raw.get(key) for key in (*FLAGS, *NORMS, "draft_vocab_size", "target_hidden_size")}
    return {**layer_config(raw.get("transformer_layer_config")), **own}


def configured_target_layers(raw: Mapping[str, Any], num_target_layers: int | None) -> tuple[tuple[int, ...], int]:
    """Return the target layers in a parsed config.json, and the number of the target's layers.

    The number is at least what the target layers need.
    """
    ids, layers = raw.get(IDS), num_target_layers
    if ids is None:
        need(layers is not None, IDS, None, "given; or name the target (--target) for the default target layers")
        return default_target_layers(layers or 0), layers or 0
    layers = layers or least_layers(ids if isinstance(ids, list) else ())
    return target_layers_of(raw, IDS, layers), layers


class Eagle3Speculators(EagleLayout):
    borrows = True

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == "eagle3"

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[Eagle3Config, bool]:
        target_layers, layers = configured_target_layers(raw, num_target_layers)
        config = network_config(network_keys(raw), renamed(tensors), target_layers, layers, _block_size(raw))
        return config, num_target_layers is not None

    def config_dict(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> dict[str, Any]:
        """Return the content of config.json. Raises ValueError if the format cannot express the configuration."""
        check_kind(config)
        return {
            "architectures": ["Eagle3Speculator"],
            **named("eagle3", config.block_size - 1, target_name, target_architectures),
            "transformer_layer_config": {"model_type": "qwen3" if config.qk_norm else "llama", **layer_keys(config)},
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.hidden_size,
            IDS: ids_of(config),
            **{key: getattr(config, key) for key in (*FLAGS, *NORMS)},
            "tie_word_embeddings": False,
            "embed_requires_grad": False,
        }

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        self.config_dict(config, target_name, target_architectures)

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        other = Start(None, "it reads SafeAILab's layout", None if config.qk_norm else export("eagle3"))
        return {VLLM: vllm_alone(drafter), SGLANG: other, TENSORRT_LLM: other}

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        raw = self.config_dict(checkpoint.config, target_name, target_architectures)
        tensors, dtype = written_tensors(checkpoint.config, checkpoint.tensors)
        renamed_tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        assert checkpoint.borrowed is not None and checkpoint.borrowed.embedding is not None
        renamed_tensors[TABLE] = checkpoint.borrowed.embedding.to(getattr(torch, dtype), copy=True)
        write_folder(path, {**raw, "dtype": dtype}, renamed_tensors, checkpoint.trained)


def _block_size(raw: Mapping[str, Any]) -> int:
    """Return the anchor and the file's number of draft tokens, at least `BLOCK_SIZE`.

    The file states how many paid in training, but the drafter can always draft as many as EAGLE-3.
    """
    draft_tokens = draft_tokens_text(raw)
    if draft_tokens is not None and type(draft_tokens) is not int:
        raise UsageError(f"speculative_tokens is {draft_tokens!r}; it must be a whole number.")
    return max(BLOCK_SIZE, 1 + (draft_tokens or 0))


LAYOUT = Eagle3Speculators()
