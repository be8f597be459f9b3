"""Gemma 2: Gemma with norms after attention and MLP, soft-caps, and a window in every other layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, mixed_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    bias = bool(config.attention_bias)
    return base_config(
        config,
        mixed_layers(config),
        activation=config.hidden_activation,
        qkv_bias=bias,
        output_bias=bias,
        norm_plus_one=True,
        post_norms=True,
        query_scale=config.query_pre_attn_scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        attention_softcap=config.attn_logit_softcapping,
        final_softcap=config.final_logit_softcapping,
    )
