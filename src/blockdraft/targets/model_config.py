"""Configurations of models. Those of common families are read without transformers, whose classes import slowly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from blockdraft.text_files import read_json, without_marks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Fields that every config.json of these families has, with their types.
REQUIRED = {
    "hidden_size": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "num_key_value_heads": int,
    "rms_norm_eps": float,
    "vocab_size": int,
}
# Other fields of each family, with the defaults of transformers.
_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_GEMMA_IDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_GEMMA: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False, **_GEMMA_IDS}
_GEMMA |= {"use_bidirectional_attention": None}
_SILU: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
_WINDOWS: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LATER_GEMMA = _GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_LATER_GEMMA |= {"sliding_window": 4096, "layer_types": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": _GEMMA | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _LATER_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": _LATER_GEMMA | {"final_logit_softcapping": None, "use_bidirectional_attention": False},
    "llama": _SILU | _LLAMA_IDS | {"attention_bias": False, "mlp_bias": False, "head_dim": None},
    "mistral": _SILU | _LLAMA_IDS | {"sliding_window": 4096, "head_dim": None},
    "qwen2": _SILU | _IDS | _WINDOWS,
    "qwen3": _SILU | _IDS | _WINDOWS | {"attention_bias": False, "head_dim": 128},
}
# Keys of a configuration that describe how it was saved, not the model.
INCIDENTAL = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
FULL, SLIDING = "full_attention", "sliding_attention"


class ModelConfig(SimpleNamespace):
    """Configuration of a text model of one of the families in `DEFAULTS`, with the fields that transformers names."""

    def get_text_config(self, decoder: bool = False) -> ModelConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


AnyConfig: TypeAlias = "ModelConfig | PretrainedConfig"


def own_config(raw: Mapping[str, Any]) -> ModelConfig | None:
    """Read a parsed config.json. Return None if only transformers can read it, or can say what is wrong with it."""
    family = raw.get("model_type")
    if family not in DEFAULTS or any(type(raw.get(name)) is not kind for name, kind in REQUIRED.items()):
        return None
    values = DEFAULTS[family] | {name: raw[name] for name in (*REQUIRED, *DEFAULTS[family], "head_dim") if name in raw}
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    if not heads or values["hidden_size"] % heads or raw.get("use_bidirectional_attention"):
        return None
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if family == "gemma" and values["hidden_act"] == "gelu":  # the old spelling of the tanh approximation
        values["hidden_act"] = "gelu_pytorch_tanh"
    if "use_sliding_window" in values and not values["use_sliding_window"]:
        values["sliding_window"] = None
    if "layer_types" in values and values["layer_types"] is None:
        period = {"gemma2": 2, "gemma3_text": raw.get("sliding_window_pattern") or 6}.get(family)
        slides = [
            (number + 1) % period != 0 if period else number >= values["max_window_layers"] for number in range(layers)
        ]
        slides = slides if values["sliding_window"] is not None or period else [False] * layers
        values["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in slides]
    values["rope_parameters"] = _rope_parameters(raw, values.get("layer_types") or ())
    if values["rope_parameters"] is None or not _is_sound(values, family):
        return None
    quantization = {name: raw[name] for name in ("quantization_config",) if raw.get(name)}
    return ModelConfig(model_type=family, architectures=raw.get("architectures"), **values, **quantization)


def _rope_parameters(raw: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, Any] | None:
    """Return rotary parameters as transformers 5 nests them, or None if the base is missing."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or "original_max_position_embeddings" in raw:
        return None
    nested = [name for name in rope if name in layer_types]
    if raw["model_type"] == "gemma3_text":
        if not {FULL, SLIDING} <= {*rope}:
            return None
        nested = [FULL, SLIDING]
    parts = {name: rope[name] for name in nested} or {"": rope}
    parameters = {}
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            return None
        theta = part.get("rope_theta", raw.get("rope_theta"))
        if type(theta) not in (int, float):
            return None
        kind = part.get("rope_type", part.get("type", "default"))
        parameters[name] = {**part, "rope_theta": theta, "rope_type": kind}
        if kind in ("llama3", "longrope", "yarn"):
            parameters[name].setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return parameters if nested else parameters[""]


def _is_sound(values: Mapping[str, Any], family: str) -> bool:
    """Return whether values have the types of their defaults, and there is a kind for each layer."""
    for name, default in DEFAULTS[family].items():
        kinds: Any = (int, float) if type(default) in (int, float) else type(default)
        kinds = (int, list) if name == "eos_token_id" else kinds
        if default is not None and values[name] is not None and not isinstance(values[name], kinds):
            return False
    types = values.get("layer_types")
    return types is None or (isinstance(types, list) and len(types) == values["num_hidden_layers"])


def make_config(raw: Mapping[str, Any]) -> AnyConfig:
    """Return the configuration of a parsed config.json."""
    if (config := own_config(raw)) is not None:
        return config
    from transformers import AutoConfig

    return AutoConfig.for_model(**raw)


def load_config(path: str | Path, revision: str | None = None) -> AnyConfig:
    """Load the configuration of a model folder or hub name. Raises what transformers raises for files it refuses."""
    if (config := own_config(_read(Path(path)))) is not None:
        return config
    from transformers import AutoConfig

    with without_marks(path) as clean:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(clean, revision=revision)
    return loaded


def _read(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json, or nothing if it is not here or cannot be read."""
    try:
        raw = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def architecture_of(config: AnyConfig) -> dict[str, Any]:
    """Return `Target.architecture` of a configuration, the same whoever has read it."""
    if (own := config if isinstance(config, ModelConfig) else own_config(config.to_dict())) is not None:
        architecture: dict[str, Any] = json.loads(json.dumps(own.to_dict()))
        return architecture
    assert not isinstance(config, ModelConfig)
    raw = json.loads(config.to_json_string())
    return {name: value for name, value in raw.items() if name not in INCIDENTAL}
