"""Draft models in z-lab's layout: a folder with config.json and safetensors.

config.json is that of z-lab's `dflash` package (`dflash/model.py`), with the variants that SpecForge, ModelOpt, vLLM
and SGLang write or read. `parse_config` resolves all variants, and refuses unsupported values by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import architecture_of, by_name, tensor_shapes
from blockdraft.formats.base import NO_TARGET, Checkpoint, DrafterTarget, Layout, Raw
from blockdraft.formats.folder import check_tensors, read_folder, write_folder
from blockdraft.formats.gguf.rope import paired
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.nn.draft_config import MAX_LAYERS, DraftConfig, LayerAttention, default_target_layers, need, whole

FULL, SLIDING = "full_attention", "sliding_attention"
# Keys of `dflash_config` that `parse_config` reads. Each is also allowed at the top level.
READ = {"block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "is_causal", "causal"}
READ |= {"use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
# Keys, at any level, that could change the forward pass, and the values with which they do not. A missing or null key
# changes nothing.
INERT: dict[str, tuple[Any, ...]] = {"projector_type": ("dflash",), "attention_mode": ("gqa", "mha")}
INERT |= {"use_aux_hidden_state": (True,), "attention_value_scale": (1,), "partial_rotary_factor": (1,)}
INERT |= dict.fromkeys(("shift_label", "sample_from_anchor", "mrope_section", "quantization_config"), (False,))
INERT |= dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias", "gru_hidden_dim", "emb_dim"), (False,))


def parse_config(raw: Mapping[str, Any], vocabulary: Mapping[str, int] | None = None) -> DraftConfig:
    """Return the configuration of a parsed config.json.

    Args:
        raw: The parsed file.
        vocabulary: The target's tokens and their ids, for files that give the mask token as text.

    Raises:
        UsageError: The file describes no drafter, lacks a value, contradicts itself, or needs something unsupported.
    """
    foreign = _object("config.json", raw).get("speculators_model_type")
    need(foreign is None, "speculators_model_type", foreign, "absent in z-lab's layout; see blockdraft export")
    architectures = raw.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and len(architectures) == 1 else ""
    known = by_name()
    need(name in known, "architectures", architectures, f"a list of one of {sorted(known)}, all that is supported")
    architecture = known[name]
    nested = _object("dflash_config", raw.get("dflash_config"))
    theta, scaling = rope_of(raw)
    inert = {**INERT, "target_hidden_size": (raw.get("hidden_size"),), "draft_vocab_size": (raw.get("vocab_size"),)}
    inert |= architecture.inert
    read = READ | architecture.own_keys() | {*architecture.training}
    for level in (raw, nested, scaling or {}):
        for key, value in level.items():
            if value is not None and (key in inert or (level is nested and key not in read)):
                need(value in inert.get(key, (False,)), key, value, "absent; this value is not supported")
    named = {field.name: _pick(raw, field.name) for field in fields(architecture.config)}
    heads, hidden = (whole(key, named[key]) for key in ("num_attention_heads", "hidden_size"))
    depth = whole("num_hidden_layers", named["num_hidden_layers"], maximum=MAX_LAYERS)
    if named["mask_token_id"] is None:
        text = _pick(raw, "mask_token")
        named["mask_token_id"] = (vocabulary or {}).get(text)
        remedy = f"in config.json, since mask_token is {text!r} and no token of the target's tokenizer"
        need(named["mask_token_id"] is not None, "mask_token_id", None, remedy)
    target_layers = _pick(raw, "target_layer_ids")
    target_layers = default_target_layers(named["num_target_layers"], depth) if target_layers is None else target_layers
    need(isinstance(target_layers, list | tuple), "target_layer_ids", target_layers, "a list of target layers")
    scaling = None if scaling is None or scaling["rope_type"] == "default" else scaling
    named |= {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "target_layers": tuple(target_layers),
        "layers": _layers(raw, depth),
    }
    named["final_logit_softcapping"] = named["final_logit_softcapping"] or None  # 0 is no cap, as in z-lab's code
    derived = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    defaults = {field.name: field.default for field in fields(architecture.config) if field.default is not MISSING}
    named |= {name: default for name, default in (defaults | derived).items() if named[name] is None}
    return architecture.config(**named)


def config_dict(config: DraftConfig) -> dict[str, Any]:
    """Return config.json for z-lab's `dflash` under transformers 5 and for readers of older layouts.

    Raises:
        UsageError: The layers differ in a way that the format cannot express.
    """
    architecture = architecture_of(config)
    layers, slides = config.layers, [layer.window is not None for layer in config.layers]
    windows, causal = {layer.window for layer in layers} - {None}, [layer.causal for layer in layers]
    sayable = len(windows) <= 1 and (causal == slides or len({*causal}) == 1)
    need(sayable, "layers", layers, "of one window, and all alike in causality or causal just where they slide")
    raw = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("mask_token_id", "target_layers", "layers")
    }
    draft = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [*config.target_layers],
    }
    nested = {name: raw.pop(name) for name in architecture.nested}
    draft |= {**architecture.marks, **{name: value for name, value in nested.items() if value is not None}}
    if causal != slides:  # otherwise the layer types imply it
        raw["is_causal"] = draft["causal"] = causal[0]  # z-lab reads the former, vLLM the latter
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {
        "architectures": [architecture.names[0]],
        "model_type": "qwen3",
        **raw,
        "mask_token_id": config.mask_token_id,  # also here, where vLLM's tpu-inference reads them
        "target_layer_ids": [*config.target_layers],
        "rope_parameters": rope,
        "dflash_config": draft,
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "use_sliding_window": any(slides),
        "sliding_window": [*windows, None][0],
        "max_window_layers": len(layers),
        "tie_word_embeddings": False,
    }


def _object(name: str, value: Any) -> Mapping[str, Any]:
    need(value is None or isinstance(value, Mapping), name, value, "a JSON object")
    return value or {}


def _agree(places: Mapping[str, Any]) -> Any:
    """Return the common value of all places, ignoring None. Raise a UsageError if two differ."""
    given = {place: value for place, value in places.items() if value is not None}
    if any(value != first for first in given.values() for value in given.values()):
        values = " but ".join(f"{place} is {value!r}" for place, value in given.items())
        raise UsageError(f"{values}; keep the one that the drafter was trained with.")
    return next(iter(given.values()), None)


def _pick(raw: Mapping[str, Any], name: str) -> Any:
    return _agree({name: raw.get(name), f"dflash_config.{name}": (raw.get("dflash_config") or {}).get(name)})


def rope_of(raw: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return RoPE's theta and its scaling without theta, from the three places that may hold them."""
    thetas, scalings = {"rope_theta": raw.get("rope_theta")}, {}
    for place in ("rope_parameters", "rope_scaling"):
        rope = _object(place, raw.get(place))
        rope = _object(place, rope.get(SLIDING) or rope.get(FULL) or rope)  # nested by layer type in some files
        scaling = {"rope_type": rope.get("type") or "default", **{k: v for k, v in rope.items() if v is not None}}
        scaling.pop("type", None)  # the older name of rope_type
        thetas[f"{place}.rope_theta"] = scaling.pop("rope_theta", None)
        scalings[place] = scaling if scaling != {"rope_type": "default"} else None
    return _agree(thetas), _agree(scalings)


def _layers(raw: Mapping[str, Any], depth: int) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer, combined as in vLLM's `qwen3_dflash.py`."""
    types, window, swa_window = raw.get("layer_types"), raw.get("sliding_window"), _pick(raw, "swa_window_size")
    if types is None:  # as in Qwen3Config
        first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") and window else depth
        types = [SLIDING if i >= whole("max_window_layers", first, minimum=0) else FULL for i in range(depth)]
    fit = isinstance(types, list) and len(types) == depth and all(kind in (FULL, SLIDING) for kind in types)
    need(fit, "layer_types", types, f"a list of {depth}, each one {FULL} or {SLIDING}")
    slides, use_swa = [kind == SLIDING for kind in types], _pick(raw, "use_swa")
    need(not use_swa or len({*slides}) == 1, "layer_types", types, "all of one type where use_swa is true")
    switched_off = any(slides) and raw.get("use_sliding_window") is False and swa_window is None
    need(not switched_off, "use_sliding_window", False, f"true where layers slide, as in layer_types, {types}")
    window = _agree({"sliding_window": window if any(slides) else None, "swa_window_size": swa_window})
    need(window is not None or not (use_swa or any(slides)), "sliding_window", None, "given where layers slide")
    causal = _pick(raw, "causal") if _pick(raw, "is_causal") is None else _pick(raw, "is_causal")
    need(causal is None or type(causal) is bool, "is_causal or causal", causal, "true or false")
    return tuple(LayerAttention(i if causal is None else causal, window if i or use_swa else None) for i in slides)


def read_checkpoint(
    path: str | Path, vocabulary: Mapping[str, int] | None = None
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read configuration and tensors of a folder onto the CPU, named as in `tensor_shapes`.

    Raises:
        UsageError: The folder is missing, incomplete or broken, or holds no drafter.
    """
    checkpoint = read_folder(path, LAYOUT, DrafterTarget(vocabulary=vocabulary))
    return checkpoint.config, {**checkpoint.tensors}


def _rotated_in_halves(config: DraftConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a network that rotates neighbouring channels together, for one that rotates halves of heads."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads, "q_norm": 1, "k_norm": 1}
    return {
        name: tensor[paired(len(tensor), heads[part])] if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in tensors.items()
    }


def write_checkpoint(
    path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor], trained: Trained = UNKNOWN
) -> None:
    """Write a folder that z-lab's `from_pretrained` loads.

    It appears completely or not at all, and replaces the folder of an earlier drafter.

    Raises:
        UsageError: The folder holds something else, or the tensors do not fit the configuration or have several dtypes.
    """
    check_tensors(tensor_shapes(config), tensors)
    write_folder(path, {**config_dict(config), "dtype": one_dtype(tensors)}, tensors, trained)


def one_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype of all tensors as in config.json. Raise a UsageError if they have several."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    need(len(dtypes) == 1, "the tensors' dtype", dtypes, "one; cast them")
    return dtypes[0]


class ZLab(Layout):
    def recognises(self, raw: Raw) -> bool:
        architectures = raw.get("architectures")
        names = architectures if isinstance(architectures, list) and "speculators_model_type" not in raw else []
        return any(name in [*by_name()] for name in names)

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[DraftConfig, bool]:
        return parse_config(raw, target.vocabulary), True

    def checkpoint(self, raw: Raw, config: DraftConfig, tensors: dict[str, Tensor]) -> Checkpoint:
        stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        stored.pop("embed_tokens.weight", None)  # copies of the target's weights, and RoPE's angles
        own = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
        own = architecture_of(config).adapted(config, own)
        check_tensors(tensor_shapes(config), own)
        neox = raw.get("rope_is_neox_style")
        need(neox in (None, True, False), "rope_is_neox_style", neox, "true or false")
        return Checkpoint(config, own if neox in (None, True) else _rotated_in_halves(config, own))

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        config_dict(config)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        if checkpoint.borrowed is not None and checkpoint.borrowed.kept is not None:
            kept = f"{len(checkpoint.borrowed.kept)} of {checkpoint.config.vocab_size} tokens"
            raise UsageError(
                f"Its draft vocabulary is {kept}, which z-lab's layout cannot express; export to speculators."
            )
        write_checkpoint(path, checkpoint.config, checkpoint.tensors, checkpoint.trained)


LAYOUT = ZLab()
