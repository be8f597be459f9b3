"""Drafters in GGUF files, as llama.cpp reads them. `kinds.py` finds what is specific to each kind.

A target layer is numbered by the layer that reads its output, one more than its own number. The tokenizer is a copy of
the target's, or left out, which makes a small file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdraft.formats.base import Checkpoint
from blockdraft.formats.gguf.files import GGUFFile, open_gguf
from blockdraft.formats.gguf.kinds import EMBEDDING, HEAD, OWN, TOKENS, kind_in, kind_of, kinds
from blockdraft.formats.gguf.rope import ROPE_BASE, ROPE_FACTORS, WORDS
from blockdraft.formats.trained import Trained
from blockdraft.nn.draft_config import need

DEPTH = f"{OWN}num_target_layers"
MODEL, TOKENS_OF_TARGET = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
# Fields of a configuration, by their GGUF keys without the architecture.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def is_drafter(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") in [kind.architecture for kind in kinds()]


def gguf_trained(file: GGUFFile) -> Trained:
    """Return how the drafter in a file was trained."""
    return Trained.read(file.metadata, OWN)


def drafter_config(file: GGUFFile, num_target_layers: int | None = None) -> Any:
    """Return the configuration of a drafter.

    Args:
        num_target_layers: Number of the target's layers, which files of other programs do not hold.

    Raises:
        UsageError: The file holds no drafter, lacks a value, or needs something unsupported.
    """
    kind, metadata = kind_in(file), file.metadata

    def get(key: str) -> Any:
        return metadata.get(f"{kind.architecture}.{key}")

    fields: dict[str, Any] = {name: get(key) for key, name in FIELDS.items()}
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    whole = hidden // heads if hidden and heads else None  # llama.cpp's default
    fields["head_dim"] = get("attention.key_length") or whole
    entered, size = get("target_layers"), len(metadata.get(TOKENS_OF_TARGET) or ()) or get("vocab_size")
    need(isinstance(entered, list), f"{kind.architecture}.target_layers", entered, "a list of layers")
    need(size is not None, TOKENS_OF_TARGET, None, f"the target's tokens, or {kind.architecture}.vocab_size a number")
    plain = {"rope.dimension_count": fields["head_dim"], "attention.value_scale": 1, "hidden_act": "silu"}
    plain |= {"target_hidden_size": hidden}
    for key, value in plain.items():
        need(get(key) in (None, value), f"{kind.architecture}.{key}", get(key), f"{value}; no other is supported")
    scaling = _scaling(metadata, f"{kind.architecture}.rope.scaling.")
    understood = ROPE_FACTORS not in file.tensors or scaling is not None
    need(
        understood,
        ROPE_FACTORS,
        "a tensor",
        "absent, since its scaling is unknown; use llama.cpp for this drafter",
    )
    config_class, own = kind.fields(file)
    fields |= {
        "vocab_size": size,
        "target_layers": tuple(layer - 1 for layer in entered),
        "num_target_layers": metadata.get(DEPTH, num_target_layers),
        "rope_theta": get("rope.freq_base") or ROPE_BASE,
        **own,
    }
    missing = sorted(name for name, value in fields.items() if value is None)
    need(not missing, f"{file.path}: {', '.join(missing)}", None, "in the file")
    return config_class(**fields, rope_scaling=scaling)


def _scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    own = {key.removeprefix(f"{OWN}rope."): value for key, value in metadata.items() if key.startswith(f"{OWN}rope.")}
    kind = metadata.get(f"{prefix}type")
    if own or kind in (None, "none"):
        return own or None
    need(kind in WORDS, f"{prefix}type", kind, f"one of {', '.join(WORDS)}")
    given = {name: metadata.get(prefix + word) for name, word in WORDS[str(kind)].items()}
    return {"rope_type": kind} | {name: value for name, value in given.items() if value is not None}


def read_gguf_drafter(path: str | Path, num_target_layers: int | None = None) -> Checkpoint:
    """Read a drafter with its weights in float32.

    Raises:
        UsageError: As in `drafter_config`, or tensors are missing, unknown or of unsupported types.
    """
    file = open_gguf(path)
    config = drafter_config(file, num_target_layers)
    kind = kind_of(config)
    known = {*kind.names(config).values(), ROPE_FACTORS, TOKENS, HEAD, EMBEDDING}
    strange = sorted(set(file.tensors) - known)
    need(not strange, f"{path}: a tensor", strange[:1], "one that is known here; use llama.cpp for this drafter")
    read = {name: tensor.tensor() for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in read.items()}
    return replace(kind.checkpoint(config, floats), trained=gguf_trained(file))
