"""Writer of GGUF files of drafters, which `blockdraft.formats.gguf.drafter` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.formats import Checkpoint
from blockdraft.formats.gguf.drafter import DEPTH, FIELDS, MODEL, TOKENS_OF_TARGET
from blockdraft.formats.gguf.kinds import LIMIT, OWN, kind_of
from blockdraft.formats.gguf.rope import IN_FACTORS, ROPE_FACTORS
from blockdraft.formats.stored import stored
from blockdraft.nn.draft_config import need
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft_tools.gguf import MatrixType
from blockdraft_tools.gguf.files import q4_0_tensor, write_gguf
from blockdraft_tools.gguf.rope import rope_factors, rope_metadata


def drafter_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of a configuration by GGUF keys.

    Raises:
        UsageError: llama.cpp cannot run such a drafter.
    """
    kind = kind_of(config)
    last, highest = config.num_target_layers - 1, max(config.target_layers)
    need(not config.attention_bias, "attention_bias", config.attention_bias, f"false {LIMIT}")
    need(highest < last, "a target layer", highest, f"below the target's last layer, {last}, {LIMIT}")
    values = {key: getattr(config, name) for key, name in FIELDS.items()}
    values |= {
        "target_hidden_size": config.hidden_size,
        "target_layers": [target_layer + 1 for target_layer in config.target_layers],
    }
    values |= rope_metadata(config.rope_theta, config.rope_scaling)
    own = {DEPTH: config.num_target_layers}
    if _in_factors(config):
        own |= {f"{OWN}rope.{name}": value for name, value in config.rope_scaling.items()}
    return {f"{kind.architecture}.{key}": value for key, value in values.items()} | kind.written(config) | own


def _in_factors(config: Any) -> bool:
    return (config.rope_scaling or {}).get("rope_type") in IN_FACTORS


def write_drafter(path: Path, drafter: Checkpoint, tokenizer: Mapping[str, Any], weights: MatrixType) -> None:
    """Write a drafter.

    Args:
        tokenizer: Metadata of the target's tokenizer and other values, by their keys. Without a tokenizer, the file
            holds the number of tokens.
        weights: As in `write_gguf`. With q4_0, all matrices of a drafter that was trained for 4 bits, head included,
            have the values that they have when it is loaded.

    Raises:
        UsageError: llama.cpp cannot run such a drafter, or `write_gguf` raised.
    """
    config = drafter.config
    metadata, kind = {**tokenizer, **drafter_metadata(config)}, kind_of(config)
    if TOKENS_OF_TARGET not in tokenizer:
        metadata |= {MODEL: "none", f"{kind.architecture}.vocab_size": config.vocab_size}
    exact = weights == "q4_0" and drafter.trained.qat_bits == 4
    tensors = {
        name: (q4_0_tensor(tensor) if exact else None) or stored(tensor)
        for name, tensor in kind.tensors(drafter).items()
    }
    if _in_factors(config):
        frequencies, _ = rotary_frequencies(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        tensors[ROPE_FACTORS] = stored(rope_factors(config.rope_theta, frequencies))
    metadata |= drafter.trained.values(OWN)
    write_gguf(path, kind.architecture, metadata, tensors, weights)
