"""Llama and its likes."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, equal_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    bias = bool(config.attention_bias)
    layers = equal_layers(config)
    return base_config(config, layers, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))
