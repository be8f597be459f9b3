"""P-EAGLE drafters in the format of vllm-project/speculators: as EAGLE-3's there (`eagle3_speculators.py`), but with an
embedding of the drafter's own. Its name sorts before `speculators`, so it is asked first which folders are its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.drafters.eagle3.layout import (
    EagleLayout,
    check_kind,
    network_config,
    renamed,
    written_tensors,
)
from blockdraft.drafters.eagle3.speculators import network_keys, own_keys, said_taps
from blockdraft.drafters.peagle.network import PEagleConfig
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import write_folder
from blockdraft.formats.speculators_config import guesses_of
from blockdraft.formats.starting import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM, Start, nowhere, vllm_alone
from blockdraft.nn.draft_config import whole

MODEL_TYPE, NAME = "peagle", "PEagleSpeculator"


def config_dict(config: Any, target_name: str | None, target_architectures: Sequence[str]) -> dict[str, Any]:
    """What config.json holds. Raises ValueError where the format has no words for the configuration."""
    check_kind(config, PEagleConfig)
    return {
        **own_keys(config, MODEL_TYPE, NAME, target_name, target_architectures),
        "mask_token_id": config.mask_token_id,
        "embed_requires_grad": True,
    }


class PEagleSpeculators(EagleLayout):
    borrows = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == MODEL_TYPE

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[PEagleConfig, bool]:
        taps, layers = said_taps(raw, num_target_layers)
        keys = network_keys(raw)
        depth = whole("num_hidden_layers", keys.get("num_hidden_layers"))
        more = {
            "num_hidden_layers": depth,
            "mask_token_id": raw.get("mask_token_id"),
            "block_size": 1 + guesses_of(raw),
        }
        config = network_config(keys, renamed(tensors), taps, layers, PEagleConfig, depth, **more)
        return config, num_target_layers is not None

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        others = nowhere(dict.fromkeys((SGLANG, TENSORRT_LLM, LLAMA_CPP), "it does not run P-EAGLE"))
        return {VLLM: vllm_alone(drafter), **others}

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        config_dict(config, target_name, target_architectures)

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        raw = config_dict(checkpoint.config, target_name, target_architectures)
        tensors, dtype = written_tensors(checkpoint.config, checkpoint.tensors)
        found = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        write_folder(path, {**raw, "dtype": dtype}, found, checkpoint.trained_for)


LAYOUT = PEagleSpeculators()
