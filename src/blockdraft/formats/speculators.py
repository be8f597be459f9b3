"""Draft models in the format of vllm-project/speculators, release 0.9: DFlash v1 and DSpark.

It differs from z-lab's layout in four ways:

- The draft layers have their own configuration inside config.json.
- A target layer is numbered by the layer that reads its output, one more than its own number. The output of the last
  layer cannot be listed.
- The file holds copies of the target's embedding and head.
- The vocabulary may be reduced. Then `t2d` marks the tokens of the draft vocabulary, of which token i is the target's
  token i + `d2t[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.formats.architectures import Architecture, architecture_of, by_name, tensor_shapes
from blockdraft.formats.base import NO_TARGET, Borrowed, Checkpoint, DrafterTarget, Layout, Raw
from blockdraft.formats.folder import check_tensors, write_folder
from blockdraft.formats.speculators_config import ids_of, layer_config, named, target_layers_of
from blockdraft.formats.vocabulary import in_order, kept_tokens, vocabulary_maps
from blockdraft.formats.zlab import config_dict as zlab_config_dict
from blockdraft.formats.zlab import one_dtype
from blockdraft.formats.zlab import parse_config as parse_zlab_config
from blockdraft.nn.draft_config import DraftConfig, need

# Fields without a key in this format, and the only values that can be written.
UNSAID = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
LAYER_KEYS: tuple[str, ...] = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
LAYER_KEYS += ("num_key_value_heads", "head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "attention_bias")
LAYER_KEYS += ("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types")
LAYER_KEYS += ("use_sliding_window", "sliding_window", "max_window_layers", "tie_word_embeddings")
# Tensors that only training uses.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")


def model_types() -> dict[str, Architecture]:
    """Return the architectures in this format by their `speculators_model_type`."""
    return {known.speculator.model_type: known for known in by_name().values() if known.speculator is not None}


def parse_config(raw: Mapping[str, Any], num_target_layers: int) -> tuple[DraftConfig, int]:
    """Return configuration and size of the draft vocabulary of a parsed config.json.

    Args:
        raw: The parsed file.
        num_target_layers: Number of the target's layers, which the file does not hold.

    Raises:
        ValueError: The file has another model type, lacks a value, or asks for something unsupported.
    """
    model_type = raw.get("speculators_model_type")
    known = model_types()
    need(model_type in [*known], "speculators_model_type", model_type, f"one of {sorted(known)}, all that is supported")
    architecture = known[str(model_type)]
    kind = architecture.speculator
    assert kind is not None
    reason = "; another convention shifts every draft token by one"
    from_anchor = raw.get("sample_from_anchor", kind.from_anchor)
    need(from_anchor is kind.from_anchor, "sample_from_anchor", from_anchor, f"{kind.from_anchor}{reason}")
    target_layers = target_layers_of(raw, "aux_hidden_state_layer_ids", num_target_layers)
    layers = layer_config(raw.get("transformer_layer_config"))
    own = {name: raw.get(name) for name in architecture.own_keys()}
    config = parse_zlab_config(
        {
            **layers,
            "architectures": [architecture.names[0]],
            "num_target_layers": num_target_layers,
            "target_hidden_size": raw.get("target_hidden_size"),
            "quantization_config": raw.get("quantization_config"),
            "is_causal": False if raw.get("sliding_window_non_causal") else None,
            "dflash_config": {
                "block_size": raw.get("block_size"),
                "mask_token_id": raw.get("mask_token_id"),
                "target_layer_ids": target_layers,
                **own,
            },
        }
    )
    size = raw.get("draft_vocab_size")
    whole = type(size) is int and 0 < size <= config.vocab_size
    need(whole, "draft_vocab_size", size, f"a whole number from 1 to vocab_size, {config.vocab_size}")
    return config, int(size or 0)


def config_dict(config: DraftConfig, target: DrafterTarget, draft_vocab_size: int) -> dict[str, Any]:
    """Return config.json. Raise a UsageError if the format cannot express the configuration."""
    architecture = architecture_of(config)
    kind = architecture.speculator
    others = f"one of {sorted(model_types())} in the speculators format; keep z-lab's layout (--format zlab)"
    need(kind is not None, "the architecture", architecture.names[0], others)
    assert kind is not None
    for name, value in UNSAID.items():
        actual = getattr(config, name)
        need(actual == value, name, actual, f"{value}, the only one in this format; keep z-lab's layout")
    full = [layer for layer in config.layers if layer.window is None]
    sliding = {layer.causal for layer in config.layers if layer.window is not None}
    sayable = not any(layer.causal for layer in full) and len(sliding) <= 1
    need(sayable, "layers", config.layers, "bidirectional where they are full, and alike in causality where they slide")
    flat, fields = zlab_config_dict(config), asdict(config)
    return {
        "architectures": [kind.name],
        **named(kind.model_type, config.block_size - (not kind.from_anchor), target),
        "transformer_layer_config": {name: flat[name] for name in LAYER_KEYS},
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": ids_of(config),
        # False means "causal" to vLLM, of layers without a window as well.
        "sliding_window_non_causal": True not in sliding,
        "sample_from_anchor": kind.from_anchor,
        "tie_word_embeddings": False,
        **{name: fields[name] for name in sorted(architecture.own_keys()) if fields[name] is not None},
    }


def _shapes(config: DraftConfig, draft_vocab_size: int, maps: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = {**tensor_shapes(config)}
    for name in _rows(config):
        shapes[name] = (draft_vocab_size, *shapes[name][1:])
    shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    shapes["lm_head.weight"] = (draft_vocab_size, config.hidden_size)
    return shapes | ({"t2d": (config.vocab_size,), "d2t": (draft_vocab_size,)} if maps else {})


def _rows(config: DraftConfig) -> tuple[str, ...]:
    """Return names of the drafter's own tensors with a row for each token of the draft vocabulary."""
    kind = architecture_of(config).speculator
    return () if kind is None else kind.rows


class Speculators(Layout):
    borrows = True

    def recognises(self, raw: Raw) -> bool:
        return "speculators_model_type" in raw

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[DraftConfig, bool]:
        ids = raw.get("aux_hidden_state_layer_ids")
        least = 1 + max((i for i in ids if type(i) is int), default=0) if isinstance(ids, list) else 1
        return parse_config(raw, target.num_layers or least)[0], target.num_layers is not None

    def checkpoint(self, raw: Raw, config: DraftConfig, tensors: dict[str, Tensor]) -> Checkpoint:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in UNUSED}
        size = int(raw["draft_vocab_size"])
        reduced = size < config.vocab_size
        optional = ("embed_tokens.weight",) if reduced else ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")
        expected = _shapes(config, size)
        check_tensors({n: s for n, s in expected.items() if n in tensors or n not in optional}, tensors)
        kept = kept_tokens(tensors.pop("t2d", None), tensors.pop("d2t", None))
        for name in _rows(config):
            if kept is None:
                break
            rows = tensors[name]
            tensors[name] = rows.new_zeros(config.vocab_size, rows.size(1)).index_copy_(0, kept, rows)
        embedding, head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
        if kept is not None and reduced and head is not None:  # its rows may be in order of frequency
            kept, head = in_order(kept, head)
        return Checkpoint(config, tensors, Borrowed(embedding, head, kept if reduced else None))

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        config_dict(config, target, config.vocab_size)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        """Write a folder that `speculators` and vLLM load.

        With a reduced vocabulary the borrowed embedding is optional: without it vLLM refuses the folder, and
        `load_drafter` uses the target's.
        """
        config, tensors, borrowed = checkpoint.config, checkpoint.tensors, checkpoint.borrowed
        check_tensors(tensor_shapes(config), tensors)
        dtype = one_dtype(tensors)
        assert borrowed is not None and borrowed.head is not None
        assert borrowed.embedding is not None or borrowed.kept is not None
        # Copied, since both may be the same tensor in the target.
        copies = {"embed_tokens.weight": borrowed.embedding, "lm_head.weight": borrowed.head}
        given = {name: tensor for name, tensor in copies.items() if tensor is not None}
        written = {**tensors, **{name: tensor.to(getattr(torch, dtype), copy=True) for name, tensor in given.items()}}
        size = config.vocab_size
        if borrowed.kept is not None:
            kept, size = borrowed.kept.cpu(), len(borrowed.kept)
            written |= vocabulary_maps(kept, config.vocab_size)
            for name in _rows(config):
                written[name] = written[name][kept.to(written[name].device)]
        shapes = _shapes(config, size, maps=borrowed.kept is not None)
        check_tensors({name: shape for name, shape in shapes.items() if name not in copies or name in given}, written)
        write_folder(path, {**config_dict(config, target, size), "dtype": dtype}, written, checkpoint.trained)


LAYOUT = Speculators()
