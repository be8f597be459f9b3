"""P-EAGLE drafters in the format of vllm-project/speculators, like EAGLE-3 drafters there
(`drafters/eagle3/speculators.py`), but with an embedding of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdraft.drafters.eagle3.layout import network_config, renamed
from blockdraft.drafters.eagle3.speculators import SpeculatorsLayout, configured_target_layers, network_keys
from blockdraft.drafters.peagle.network import PEagleConfig
from blockdraft.formats.speculators_config import draft_tokens_of
from blockdraft.formats.starting import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM, Start, nowhere, vllm_alone
from blockdraft.nn.draft_config import whole


class PEagleSpeculators(SpeculatorsLayout):
    borrows = False
    model_type, architecture, kind = "peagle", "PEagleSpeculator", PEagleConfig

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[PEagleConfig, bool]:
        target_layers, layers = configured_target_layers(raw, num_target_layers)
        keys = network_keys(raw)
        depth = whole("num_hidden_layers", keys.get("num_hidden_layers"))
        more = {
            "num_hidden_layers": depth,
            "mask_token_id": raw.get("mask_token_id"),
            "block_size": 1 + draft_tokens_of(raw),
        }
        config = network_config(keys, renamed(tensors), target_layers, layers, PEagleConfig, depth, **more)
        return config, num_target_layers is not None

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        others = nowhere(dict.fromkeys((SGLANG, TENSORRT_LLM, LLAMA_CPP), "it does not run P-EAGLE"))
        return {VLLM: vllm_alone(drafter), **others}

    def config_dict(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> dict[str, Any]:
        return {
            **super().config_dict(config, target_name, target_architectures),
            "mask_token_id": config.mask_token_id,
        }


LAYOUT = PEagleSpeculators()
