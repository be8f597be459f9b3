"""DFlash v1 draft models in z-lab's layout: a folder with config.json and safetensors.

The layout is that of z-lab's `dflash` package (`dflash/model.py`), with the variants of config.json that SpecForge,
ModelOpt, vLLM and SGLang write or read. They are resolved here once; what we cannot compute is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.nn.draft_config import DraftConfig, LayerAttention, default_taps, need, whole

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
# Keys of `dflash_config` that `parse_config` reads; each may as well stand at the top level.
READ = {"block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "is_causal", "causal"}
READ |= {"use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
# Keys that change the forward pass, at any level, and the values under which they do not. Absent and null never do.
INERT: dict[str, tuple[Any, ...]] = {"projector_type": ("dflash",), "attention_mode": ("gqa", "mha")}
INERT |= {"use_aux_hidden_state": (True,), "attention_value_scale": (1,), "partial_rotary_factor": (1,)}
INERT |= dict.fromkeys(("shift_label", "sample_from_anchor", "mrope_section", "quantization_config"), (False,))
INERT |= dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias", "gru_hidden_dim", "emb_dim"), (False,))


def parse_config(raw: Mapping[str, Any], vocabulary: Mapping[str, int] | None = None) -> DraftConfig:
    """Resolve the contents of a config.json.

    Args:
        raw: The parsed file.
        vocabulary: The target's tokens and their ids, for files that give the mask token as text.

    Raises:
        ValueError: The file is no DFlash v1 model, lacks a value, contradicts itself, or asks for the unsupported.
    """
    found = _object("config.json", raw).get("architectures")
    need(found == [ARCHITECTURE], "architectures", found, f"{[ARCHITECTURE]}, all that is supported")
    nested = _object("dflash_config", raw.get("dflash_config"))
    theta, scaling = _rope(raw)
    inert = {**INERT, "target_hidden_size": (raw.get("hidden_size"),), "draft_vocab_size": (raw.get("vocab_size"),)}
    for level in (raw, nested, scaling or {}):
        for key, value in level.items():
            if value is not None and (key in inert or (level is nested and key not in READ)):
                need(value in inert.get(key, (False,)), key, value, "absent: this value is not supported")
    named = {field.name: _pick(raw, field.name) for field in fields(DraftConfig)}
    depth, heads, hidden = (whole(k, named[k]) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if named["mask_token_id"] is None:
        text = _pick(raw, "mask_token")
        named["mask_token_id"] = (vocabulary or {}).get(text)
        remedy = f"in config.json, since mask_token is {text!r} and no token of the target's tokenizer"
        need(named["mask_token_id"] is not None, "mask_token_id", None, remedy)
    taps = _pick(raw, "target_layer_ids")
    taps = default_taps(named["num_target_layers"], depth) if taps is None else taps
    need(isinstance(taps, list | tuple), "target_layer_ids", taps, "a list of target layers")
    scaling = None if scaling is None or scaling["rope_type"] == "default" else scaling
    named |= {"rope_theta": theta, "rope_scaling": scaling, "taps": tuple(taps), "layers": _layers(raw, depth)}
    named["final_logit_softcapping"] = named["final_logit_softcapping"] or None  # 0 is no cap, as in z-lab's code
    derived = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    defaults = {field.name: field.default for field in fields(DraftConfig) if field.default is not MISSING} | derived
    named |= {name: default for name, default in defaults.items() if named[name] is None}
    return DraftConfig(**named)


def config_dict(config: DraftConfig) -> dict[str, Any]:
    """What config.json holds, for z-lab's `dflash` under transformers 5 and for readers of older layouts. Raises
    ValueError where the layers differ in a way the format has no words for."""
    layers, slides = config.layers, [layer.window is not None for layer in config.layers]
    windows, causal = {layer.window for layer in layers} - {None}, [layer.causal for layer in layers]
    sayable = len(windows) <= 1 and (causal == slides or len({*causal}) == 1)
    need(sayable, "layers", layers, "of one window, and all alike in causality or causal just where they slide")
    raw = {name: value for name, value in asdict(config).items() if name not in ("mask_token_id", "taps", "layers")}
    draft = {"block_size": config.block_size, "mask_token_id": config.mask_token_id, "target_layer_ids": [*config.taps]}
    if causal != slides:  # else the layer types imply it
        raw["is_causal"] = draft["causal"] = causal[0]  # z-lab reads the former, vLLM the latter
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **raw,
        "rope_parameters": rope,
        "dflash_config": draft,
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "use_sliding_window": any(slides),
        "sliding_window": [*windows, None][0],
        "max_window_layers": len(layers),
        "tie_word_embeddings": False,
    }


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint: 11 a layer (15 with biases) and 3 more."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkvo"}
    top = {"fc.weight": (hidden, len(config.taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return top | {f"layers.{i}.{name}": layer[name] for i in range(config.num_hidden_layers) for name in layer}


def read_checkpoint(
    path: str | Path, vocabulary: Mapping[str, int] | None = None
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a folder with config.json and one or several safetensors files of any name. The tensors come on the CPU and
    are named as in `tensor_shapes`. For `vocabulary` see `parse_config`.

    Raises:
        ValueError: The folder is absent, incomplete or broken, or holds no DFlash v1 model.
    """
    file, tensors = Path(path, "config.json"), dict[str, Tensor]()
    try:
        config = parse_config(json.loads(file.read_text(encoding="utf-8")), vocabulary)
        for file in sorted(Path(path).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                need(name not in tensors, name, "a repeated tensor", "in one file; keep one copy of the weights")
                if name != "embed_tokens.weight" and not name.endswith("rotary_emb.inv_freq"):  # not the drafter's own
                    tensors[name] = tensor
        need(file.suffix == ".safetensors", "*.safetensors", None, "beside it; copy the drafter's weights there")
        file = Path(path)
        _check_tensors(config, tensors)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a drafter's folder or copy it again.") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return config, tensors


def write_checkpoint(path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that z-lab's `DFlashDraftModel.from_pretrained` loads. It appears whole or not at all, and
    replaces the whole of a draft model's folder. Raises ValueError where that folder holds something else, or where the
    tensors do not fit the configuration or are not of one dtype."""
    path, raw = Path(path).resolve(), config_dict(config)
    _check_tensors(config, tensors)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    need(len(dtypes) == 1, "the tensors' dtype", dtypes, "one; cast them")
    ours = (path / "config.json").is_file() and f'"{ARCHITECTURE}"'.encode() in (path / "config.json").read_bytes()
    free = ours or not path.exists() or (path.is_dir() and not any(path.iterdir()))
    need(free, "the folder to write", str(path), "new, empty or a draft model's; choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps({**raw, "dtype": dtypes[0]}, indent=2) + "\n", encoding="utf-8")
        (new / "model.safetensors").chmod((new / "config.json").stat().st_mode)  # safetensors lets only the owner read
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)


def check_fits(
    config: DraftConfig, *, hidden_size: int, num_layers: int, vocab_size: int, max_context: int | None = None
) -> None:
    """Check a drafter against its target, whose embedding, head and features it borrows, and against the longest
    context to be decoded, in tokens (None is not checked). Raises ValueError where they do not fit."""
    for name, theirs in (("hidden_size", hidden_size), ("num_target_layers", num_layers), ("vocab_size", vocab_size)):
        ours = getattr(config, name)
        need(ours == theirs, f"the drafter's {name}", ours, f"the target's, {theirs}; use a drafter made for it")
    limit = config.max_position_embeddings
    need((max_context or 0) <= limit, "max_context", max_context, f"at most the drafter's positions, {limit}")


def _object(name: str, value: Any) -> Mapping[str, Any]:
    need(value is None or isinstance(value, Mapping), name, value, "a JSON object")
    return value or {}


def _agree(places: Mapping[str, Any]) -> Any:
    """The value that the places hold; a place that holds None has no say."""
    held = {place: value for place, value in places.items() if value is not None}
    told = " but ".join(f"{place} is {value!r}" for place, value in held.items())
    if any(value != first for first in held.values() for value in held.values()):
        raise ValueError(f"{told}; keep the one that the drafter was trained with.")
    return next(iter(held.values()), None)


def _pick(raw: Mapping[str, Any], name: str) -> Any:
    return _agree({name: raw.get(name), f"dflash_config.{name}": (raw.get("dflash_config") or {}).get(name)})


def _rope(raw: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Theta, and the scaling without it, from the three places that may hold them."""
    thetas, scalings = {"rope_theta": raw.get("rope_theta")}, {}
    for place in ("rope_parameters", "rope_scaling"):
        rope = _object(place, raw.get(place))
        rope = _object(place, rope.get(SLIDING) or rope.get(FULL) or rope)  # some nest it by layer type
        scaling = {"rope_type": rope.get("type") or "default", **{k: v for k, v in rope.items() if v is not None}}
        scaling.pop("type", None)  # the older name of rope_type
        thetas[f"{place}.rope_theta"] = scaling.pop("rope_theta", None)
        scalings[place] = scaling if scaling != {"rope_type": "default"} else None
    return _agree(thetas), _agree(scalings)


def _layers(raw: Mapping[str, Any], depth: int) -> tuple[LayerAttention, ...]:
    """What each layer attends to. Layer types, window and causality combine as in vLLM's `qwen3_dflash.py`."""
    types, window, swa_window = raw.get("layer_types"), raw.get("sliding_window"), _pick(raw, "swa_window_size")
    if types is None:  # the rule of Qwen3Config
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


def _check_tensors(config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    expected, found = tensor_shapes(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    told = "; ".join(f"{name}: expected {expected.get(name)}, found {found.get(name)}" for name in wrong[:5])
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not fit the configuration: {told}. Use files that belong together.")
