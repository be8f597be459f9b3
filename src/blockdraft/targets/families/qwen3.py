"""Qwen3: norms of queries and keys; a sliding window in some layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, mixed_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    bias = bool(config.attention_bias)
    return base_config(config, mixed_layers(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
