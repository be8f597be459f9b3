"""Writer of GGUF files of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.gguf.rope import IN_FACTORS, ROPE_FACTORS
from blockdraft.formats.stored import MadeTensor, StoredTensor, stored
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.base import NotCovered
from blockdraft.targets.families import decoder_config
from blockdraft.targets.gguf.config import ARCHITECTURES, GRANITE_SCALES, gguf_config
from blockdraft.targets.gguf.tensors import fitted, our_names, row_orders
from blockdraft.targets.model_config import AnyConfig
from blockdraft_tools.checkpoint import OpenCheckpoint, differences
from blockdraft_tools.gguf import MatrixType
from blockdraft_tools.gguf.files import write_gguf
from blockdraft_tools.gguf.rope import rope_factors, rope_metadata


def gguf_architecture(source: OpenCheckpoint) -> str:
    """Return the architecture of a target in llama.cpp."""
    return ARCHITECTURES[source.config.model_type]


def write_gguf_target(path: Path, source: OpenCheckpoint, tokenizer: Mapping[str, Any], weights: MatrixType) -> None:
    """Write a target to a GGUF file, with one tensor at a time in memory.

    Args:
        path: File to write.
        source: The target's checkpoint.
        tokenizer: Metadata of the tokenizer and other values for the file.
        weights: As in `write_gguf`.

    Raises:
        UsageError: GGUF cannot describe all settings of the model, or as in `write_gguf`.
    """
    name, config = gguf_architecture(source), source.config
    values = {f"{name}.{key}": value for key, value in gguf_metadata(config, source.wanted).items()}
    rope = config.rope_parameters
    by_factors = rope.get("rope_type") in IN_FACTORS
    tensors = gguf_tensors(name, source.wanted, source.tensors, float(rope["rope_theta"]) if by_factors else None)
    write_gguf(path, name, {**tokenizer, **values}, tensors, weights)
    _check(path, source.wanted)


def _check(path: Path, wanted: DecoderConfig) -> None:
    """Raise a UsageError unless a file is read back as this decoder."""
    file, wrong = open_gguf(path), ""
    try:
        actual = fitted(decoder_config(gguf_config(file)), file)
    except NotCovered as refused:
        wrong = str(refused)
    else:
        other = differences(actual, replace(wanted, norm_plus_one=False))  # the one is added to the weights
        wrong = f"it would lose {', '.join(other)}" if other else ""
    if wrong:
        raise UsageError(f"The target cannot be written as a GGUF file, which cannot describe it: {wrong}.")


def gguf_metadata(config: AnyConfig, wanted: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of a supported model by keys without the architecture, one of `ARCHITECTURES`.

    Settings without a key in GGUF are left out.

    Raises:
        UsageError: GGUF has no keys for the rotary embeddings.
    """
    rope: Mapping[str, Any] = config.rope_parameters
    full = rope.get("full_attention") or rope
    metadata: dict[str, Any] = {
        "vocab_size": wanted.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": wanted.hidden_size,
        "block_count": len(wanted.layers),
        "feed_forward_length": wanted.intermediate_size,
        "attention.head_count": wanted.num_heads,
        "attention.head_count_kv": wanted.num_kv_heads,
        "attention.key_length": wanted.head_dim,
        "attention.value_length": wanted.head_dim,
        "attention.layer_norm_rms_epsilon": float(wanted.norm_eps),
        "rope.dimension_count": wanted.rotated,
        **rope_metadata(full["rope_theta"], full),
    }
    if config.model_type == "granite":
        metadata |= {key: float(getattr(config, field)) for field, (key, _) in GRANITE_SCALES.items()}
        metadata["attention.scale"] = float(config.attention_multiplier)
    if config.model_type == "phi3":
        metadata["attention.sliding_window"] = config.sliding_window or 0
    if wanted.post_norms and len(wanted.windows) > 1:  # Gemma 2 and 3, OLMo 3
        windows = [kind.window for kind in wanted.layers]
        metadata |= {"attention.sliding_window": config.sliding_window}
        metadata |= {"attention.sliding_window_pattern": [size is not None for size in windows]}
        caps = {"attn_logit_softcapping": wanted.attention_softcap, "final_logit_softcapping": wanted.final_softcap}
        metadata |= {key: float(cap) for key, cap in caps.items() if cap is not None}
        if "sliding_attention" in rope and config.model_type != "olmo3":
            metadata["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    return metadata


def gguf_tensors(
    architecture: str, config: DecoderConfig, tensors: Mapping[str, StoredTensor], factors_of: float | None
) -> dict[str, StoredTensor]:
    """Return the tensors for a file of this architecture, by their names there.

    Args:
        tensors: Tensors of the decoder by our names.
        factors_of: Base of rotary embeddings, if the file stores a factor for each frequency.
    """
    orders, written = row_orders(architecture, config), dict[str, StoredTensor]()
    for ours, theirs in our_names(architecture, config).items():
        tensor = tensors[ours]
        if ours in orders:
            tensor = tensor.rows(orders[ours].argsort())
        elif config.norm_plus_one and ours.endswith("norm.weight"):
            tensor = MadeTensor(tensor.shape, "F32", partial(_plus_one, tensor))
        written[theirs] = tensor
    if factors_of is not None:
        frequencies = torch.tensor(config.layers[0].rope.inverse_frequencies)
        written[ROPE_FACTORS] = stored(rope_factors(factors_of, frequencies))
    return written


def _plus_one(tensor: StoredTensor) -> Tensor:
    return tensor.tensor().float() + 1
