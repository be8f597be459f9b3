"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in some layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, mixed_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    return base_config(config, mixed_layers(config), qkv_bias=True)
