"""Gemma: scaled embeddings, and norms whose weights are offsets from one."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, equal_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    bias = bool(config.attention_bias)
    return base_config(
        config,
        equal_layers(config),
        qkv_bias=bias,
        output_bias=bias,
        norm_plus_one=True,
        embedding_scale=config.hidden_size**0.5,
    )
