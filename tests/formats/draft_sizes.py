"""Sizes of a small drafter, by the names that configurations and config.json share."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_target_layers": 8,
    "max_position_embeddings": 128,
}
