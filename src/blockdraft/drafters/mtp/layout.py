"""Layouts of an MTP head in its own folder.

Ours has tensors as Qwen3-Next's checkpoints hold them under `mtp.`, where a norm's weight is stored as its difference
from 1. The other is the speculators format, see `formats/speculators.py`; speculators trains heads for models that have
one (Qwen3-Next, Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.drafters.mtp.in_target import StoredHead
from blockdraft.drafters.mtp.network import MTPConfig
from blockdraft.drafters.mtp.target_network import TargetMTPConfig, one_layer
from blockdraft.formats.base import NO_TARGET, Checkpoint, DrafterTarget, Layout, Raw, check_kind
from blockdraft.formats.folder import check_tensors, write_folder
from blockdraft.formats.speculators_config import draft_tokens_of, layer_config, named
from blockdraft.formats.starting import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM, Start, nowhere
from blockdraft.formats.stored import check_floats, stored
from blockdraft.formats.zlab import one_dtype, rope_of
from blockdraft.nn.draft_config import need
from blockdraft.nn.draft_network import shapes_of

NAME = "MTPDraftModel"
PREFIX = "mtp."
NOT_RUN = dict.fromkeys(
    (VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP), "it runs MTP heads that lie in the target's own checkpoint, and no others"
)

# The speculators format.
MODEL_TYPE = "mtp"
OURS = "qwen3"  # type of the layer that is trained here
OTHERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LAYERS = "mtp_layers.0."
AROUND = {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
AROUND = {name: LAYERS + own for name, own in {**AROUND, "fc": "input_proj", "norm": "final_layernorm"}.items()}
UNUSED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
KEYS: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
KEYS += ("vocab_size",) + ("rms_norm_eps", "max_position_embeddings", "attention_bias")


class MTP(Layout):
    def recognises(self, raw: Raw) -> bool:
        return raw.get("architectures") == [NAME] and "speculators_model_type" not in raw

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[MTPConfig, bool]:
        known = {field.name for field in fields(MTPConfig)}
        given = {name: value for name, value in raw.items() if name in known}
        for name in known - {*given} - {"rope_scaling"}:
            need(False, name, None, "given; write the head with the version that trained it")
        return MTPConfig(**given), True

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(NOT_RUN)

    def checkpoint(self, raw: Raw, config: MTPConfig, tensors: dict[str, Tensor]) -> Checkpoint:
        check_tensors({PREFIX + name: shape for name, shape in shapes_of(config.network).items()}, tensors)
        return Checkpoint(config, {name.removeprefix(PREFIX): _shifted(name, one, 1) for name, one in tensors.items()})

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        check_kind(config, MTPConfig)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        self.check(checkpoint.config, target)
        check_tensors(shapes_of(checkpoint.config.network), checkpoint.tensors)
        raw = {"architectures": [NAME], "num_nextn_predict_layers": 1, **asdict(checkpoint.config)}
        tensors = {PREFIX + name: _shifted(name, one, -1) for name, one in checkpoint.tensors.items()}
        write_folder(path, raw, tensors, checkpoint.trained)


def _shifted(name: str, tensor: Tensor, by: int) -> Tensor:
    """Return the tensor, with `by` added if it is the weight of a norm."""
    return tensor + by if tensor.ndim == 1 and "norm" in name else tensor


def config_dict(config: Any, target: DrafterTarget) -> dict[str, Any]:
    """Return the content of config.json. Raises ValueError if the format cannot express the configuration."""
    check_kind(config, MTPConfig)
    limit = "true, because in this format a step reads the output of the last norm; keep the layout mtp"
    need(config.normed_feedback, "normed_feedback", config.normed_feedback, limit)
    return {
        "architectures": [NAME],
        **named(MODEL_TYPE, config.block_size - 1, target),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {
            "model_type": OURS,
            **{key: getattr(config, key) for key in KEYS},
            "num_hidden_layers": config.num_target_layers,  # readers derive the head's input from it
            "hidden_act": "silu",
            "rope_theta": config.rope_theta,
            "rope_scaling": config.rope_scaling,
            "tie_word_embeddings": False,
        },
        "tie_word_embeddings": False,
    }


def parse_config(
    raw: Mapping[str, Any], num_target_layers: int, has_experts: bool = False
) -> MTPConfig | TargetMTPConfig:
    """Return the configuration in a parsed config.json.

    Args:
        num_target_layers: Number of the target's layers.
        has_experts: Whether the checkpoint has tensors of experts.

    Raises:
        ValueError: The file lacks a value or asks for something unsupported.
    """
    heads = raw.get("num_nextn_predict_layers", 1)
    need(heads == 1, "num_nextn_predict_layers", heads, "1, the only supported number")
    block_size = 1 + draft_tokens_of(raw)
    layers = layer_config(raw.get("transformer_layer_config"))
    kind = layers.pop("model_type")
    if kind in OTHERS:
        from transformers import AutoConfig

        layer = one_layer(AutoConfig.for_model(kind, **layers), has_experts)
        return TargetMTPConfig(layer=layer, num_target_layers=num_target_layers, block_size=block_size)
    need(kind == OURS, "model_type of transformer_layer_config", kind, f"one of {', '.join((OURS, *OTHERS))}")
    first = (layers.get("layer_types") or ["full_attention"])[0]
    need(first == "full_attention", "the first of layer_types", first, "full_attention, the only supported type")
    need(layers["hidden_act"] == "silu", "hidden_act", layers["hidden_act"], "silu, the only supported function")
    theta, scaling = rope_of(layers)
    scaling = None if scaling is None or scaling["rope_type"] == "default" else scaling
    own = {key: layers[key] for key in KEYS}
    return MTPConfig(
        **own, num_target_layers=num_target_layers, block_size=block_size, rope_theta=theta, rope_scaling=scaling
    )


class MTPSpeculators(Layout):
    def recognises(self, raw: Raw) -> bool:
        return raw.get("speculators_model_type") == MODEL_TYPE

    def config(
        self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget
    ) -> tuple[MTPConfig | TargetMTPConfig, bool]:
        has_experts = StoredHead(tensors, LAYERS, AROUND).has_experts
        return parse_config(raw, target.num_layers or 1, has_experts), target.num_layers is not None

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(NOT_RUN)

    def checkpoint(self, raw: Raw, config: Any, tensors: dict[str, Tensor]) -> Checkpoint:
        own = {name: stored(tensor) for name, tensor in tensors.items() if name not in UNUSED}
        check_floats(own)
        return Checkpoint(config, StoredHead(own, LAYERS, AROUND).read(shapes_of(config.network)))

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        config_dict(config, target)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        raw = config_dict(checkpoint.config, target)
        check_tensors(shapes_of(checkpoint.config.network), checkpoint.tensors)
        names = StoredHead({}, LAYERS, AROUND)
        tensors = {names.own(name): tensor for name, tensor in checkpoint.tensors.items()}
        write_folder(path, {**raw, "dtype": one_dtype(tensors)}, tensors, checkpoint.trained)


LAYOUT, SPECULATORS = MTP(), MTPSpeculators()
