"""Drafters in GGUF files, as llama.cpp reads and writes them: DFlash, DFlash2 and DSpark, all of the architecture
`dflash`.

A tap is numbered by the target layer that it enters, one more than the layer that it leaves. Embedding and head are the
target's; the tokenizer is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import LlamaCpp, architecture_of, by_name, tensor_shapes
from blockdraft.formats.base import Borrowed, Checkpoint
from blockdraft.formats.folder import check_tensors
from blockdraft.formats.gguf.files import GGUFFile, open_gguf
from blockdraft.formats.gguf.rope import IN_FACTORS, ROPE_FACTORS, WORDS, rope_factors, rope_metadata
from blockdraft.formats.gguf.write import write_gguf
from blockdraft.formats.stored import stored
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, need
from blockdraft.nn.quantized import QuantizedWeight
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft.types import GGUFWeights

ARCHITECTURE = "dflash"
MASK = "tokenizer.ggml.mask_token_id"
OWN = "blockdraft."  # keys of ours, which llama.cpp does not look at
TRAINED_FOR = f"{OWN}target_fingerprint"
HEAD, TOKENS = "output.weight", "d2t"
# From names of tensors in z-lab's layout to those of llama.cpp; of layers without `layers.N.` and `blk.N.`. An
# architecture may have more of its own.
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
# Fields of a configuration, by their keys without the architecture.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_size": "block_size",
}
SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}


def their_names(config: DraftConfig) -> dict[str, str]:
    """llama.cpp's names of a drafter's tensors, by those of z-lab's layout."""
    kind, found = _kind(config), {}
    names = NAMES | {**kind.names}
    for name in tensor_shapes(config):
        parts = name.split(".", 2)
        found[name] = f"blk.{parts[1]}.{names[parts[2]]}" if parts[0] == "layers" else names[name]
    return found


def _kind(config: DraftConfig) -> LlamaCpp:
    known = {one.config: one for one in by_name().values() if one.llama_cpp is not None}
    names = ", ".join(sorted(one.names[0] for one in known.values()))
    kind = type(config).__name__.removesuffix("Config")
    need(type(config) in known, "the kind of drafter", kind, f"one of those that GGUF files hold here, {names}")
    found = known[type(config)].llama_cpp
    assert found is not None
    return found


def drafter_metadata(config: DraftConfig) -> dict[str, Any]:
    """A configuration as values by their keys.

    Raises:
        UsageError: llama.cpp cannot run such a drafter.
    """
    _check(config)
    windows = [layer.window for layer in config.layers]
    found = {key: getattr(config, name) for key, name in FIELDS.items()}
    found |= {"attention.causal": config.layers[0].causal, "target_hidden_size": config.hidden_size}
    found |= {"target_layers": [tap + 1 for tap in config.taps]}
    if any(windows):
        found |= {"attention.sliding_window": max(size or 0 for size in windows)}
        found |= {"attention.sliding_window_pattern": [size is not None for size in windows]}
    for key, name in SCALES.items():
        value = getattr(config, name)
        if value is not None and value != getattr(DraftConfig, name):
            found[key] = float(value)
    found |= _kind(config).written(config)
    found |= rope_metadata(config.rope_theta, config.rope_scaling)
    named = {f"{ARCHITECTURE}.{key}": value for key, value in found.items()}
    own = {"num_target_layers": config.num_target_layers}
    if _in_factors(config):
        own |= {f"rope.{name}": value for name, value in (config.rope_scaling or {}).items()}
    return named | {MASK: config.mask_token_id} | {OWN + name: value for name, value in own.items()}


def _in_factors(config: DraftConfig) -> bool:
    return (config.rope_scaling or {}).get("rope_type") in IN_FACTORS


def _check(config: DraftConfig) -> None:
    """Raise a UsageError for what llama.cpp's drafters have not."""
    causal, windows = {layer.causal for layer in config.layers}, {layer.window for layer in config.layers} - {None}
    limit = "in llama.cpp; use another engine"
    need(not config.attention_bias, "attention_bias", config.attention_bias, f"false {limit}")
    need(len(causal) == 1, "the layers' causality", [x.causal for x in config.layers], f"the same for all {limit}")
    need(len(windows) <= 1, "the layers' windows", sorted(windows, key=str), f"of one size {limit}")
    last, highest = config.num_target_layers - 1, max(config.taps)
    need(highest < last, "a tap", highest, f"below the target's last layer, {last}, {limit}")


def write_drafter(path: Path, drafter: Checkpoint, tokenizer: Mapping[str, Any], weights: GGUFWeights) -> None:
    """Write a drafter.

    Args:
        tokenizer: The target's, as values by their keys, with other values that the file is to have.
        weights: As in `write_gguf`.

    Raises:
        UsageError: llama.cpp cannot run such a drafter, or as in `write_gguf`.
    """
    config, own = drafter.config, dict(drafter.tensors)
    names, metadata = their_names(config), {**tokenizer, **drafter_metadata(config)}
    check_tensors(tensor_shapes(config), own)
    kept = None if drafter.borrowed is None else drafter.borrowed.kept
    if kept is not None:
        own |= {name: own[name][kept] for name in _rows(config)}
    tensors = {names[name]: stored(tensor) for name, tensor in own.items()}
    if _in_factors(config):
        frequencies, _ = rotary_frequencies(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        tensors[ROPE_FACTORS] = stored(rope_factors(config.rope_theta, frequencies))
    if kept is not None:
        assert drafter.borrowed is not None and drafter.borrowed.head is not None
        tensors |= {HEAD: stored(drafter.borrowed.head), TOKENS: stored(kept)}
    if drafter.trained_for is not None:
        metadata[TRAINED_FOR] = drafter.trained_for
    write_gguf(path, ARCHITECTURE, metadata, tensors, weights)


def _rows(config: DraftConfig) -> tuple[str, ...]:
    """The drafter's own tensors with a row for each token that it can guess."""
    kind = architecture_of(config).speculator
    return () if kind is None else kind.rows


def is_drafter(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") == ARCHITECTURE


def gguf_trained_for(file: GGUFFile) -> str | None:
    """`Checkpoint.trained_for`."""
    return file.metadata.get(TRAINED_FOR)


def drafter_config(file: GGUFFile, num_target_layers: int | None = None) -> DraftConfig:
    """The configuration of a drafter.

    Args:
        num_target_layers: Of the target, which files of other programs do not say.

    Raises:
        UsageError: It is no drafter, lacks a value, or asks for the unsupported.
    """
    metadata = file.metadata
    if not is_drafter(file):
        found = metadata.get("general.architecture")
        raise UsageError(f"{file.path} is no drafter: its architecture is {found} instead of {ARCHITECTURE}.")

    def get(key: str) -> Any:
        return metadata.get(f"{ARCHITECTURE}.{key}")

    fields: dict[str, Any] = {name: get(key) for key, name in FIELDS.items()}
    fields |= {name: value for key, name in SCALES.items() if (value := get(key)) is not None}
    fields["head_dim"] = get("attention.key_length")
    entered, tokens = get("target_layers"), metadata.get("tokenizer.ggml.tokens")
    need(isinstance(entered, list), "dflash.target_layers", entered, "a list of layers")
    need(bool(tokens), "tokenizer.ggml.tokens", None, "the target's tokens")
    depth = fields["num_hidden_layers"]
    window, slides = get("attention.sliding_window"), get("attention.sliding_window_pattern") or [False] * (depth or 0)
    causal = bool(get("attention.causal"))
    plain = {"rope.dimension_count": fields["head_dim"], "attention.value_scale": 1, "hidden_act": "silu"}
    for key, value in plain.items():
        need(get(key) in (None, value), f"{ARCHITECTURE}.{key}", get(key), f"{value}; no other is supported")
    scaling = _scaling(metadata)
    understood = ROPE_FACTORS not in file.tensors or scaling is not None
    need(understood, ROPE_FACTORS, "there", "absent, since what made it is not said; use llama.cpp for this drafter")
    fields |= {
        "vocab_size": len(tokens or ()),
        "mask_token_id": metadata.get(MASK),
        "taps": tuple(layer - 1 for layer in entered),
        "num_target_layers": metadata.get(f"{OWN}num_target_layers", num_target_layers),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": scaling,
        "layers": tuple(LayerAttention(causal, window if slid else None) for slid in slides),
    }
    missing = sorted(name for name, value in fields.items() if value is None and name != "rope_scaling")
    need(not missing, f"{file.path}: {', '.join(missing)}", None, "in the file")
    values = {key.removeprefix(f"{ARCHITECTURE}."): value for key, value in metadata.items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    kinds = sorted(by_name().values(), key=lambda one: -len(one.own_keys()))  # the last one takes what is left
    for one in kinds:
        own = None if one.llama_cpp is None else one.llama_cpp.read(values, shapes)
        if own is not None:
            return one.config(**fields, **own)
    raise AssertionError("DFlash v1 has no marks")


def _scaling(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    own = {key.removeprefix(f"{OWN}rope."): value for key, value in metadata.items() if key.startswith(f"{OWN}rope.")}
    prefix = f"{ARCHITECTURE}.rope.scaling."
    kind = metadata.get(f"{prefix}type")
    if own or kind in (None, "none"):
        return own or None
    need(kind in WORDS, f"{prefix}type", kind, f"one of {', '.join(WORDS)}")
    given = {name: metadata.get(prefix + word) for name, word in WORDS[str(kind)].items()}
    return {"rope_type": kind} | {name: value for name, value in given.items() if value is not None}


def read_gguf_drafter(path: str | Path, num_target_layers: int | None = None) -> Checkpoint:
    """Read a drafter, its weights in float32. Errors as in `drafter_config`, and where tensors are absent or of types
    that are not read."""
    file = open_gguf(path)
    config = drafter_config(file, num_target_layers)
    shapes, tensors = tensor_shapes(config), dict[str, Tensor]()
    names = their_names(config)
    strange = sorted(set(file.tensors) - {*names.values(), ROPE_FACTORS, TOKENS, HEAD, "token_embd.weight"})
    need(not strange, f"{path}: a tensor", strange[:1], "one that is known here; use llama.cpp for this drafter")
    for ours, theirs in names.items():
        if theirs in file.tensors:
            tensors[ours] = _tensor(file, theirs)
    borrowed = None
    if TOKENS in file.tensors:
        kept = _tensor(file, TOKENS)
        borrowed = Borrowed(None, _tensor(file, HEAD), kept)
        for name in _rows(config):
            rows = tensors[name]
            tensors[name] = rows.new_zeros(config.vocab_size, rows.size(1)).index_copy_(0, kept, rows)
    check_tensors(shapes, tensors)
    return Checkpoint(config, tensors, borrowed, gguf_trained_for(file))


def _tensor(file: GGUFFile, name: str) -> Tensor:
    found = file.tensors[name].read()
    found = found.dequantize() if isinstance(found, QuantizedWeight) else found
    return found.float() if found.is_floating_point() else found
