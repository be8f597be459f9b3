"""Qwen3 with routed experts: Qwen3 whose MLPs, in all layers or some, are experts that a router chooses."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig, Experts
from blockdraft.targets.families.base import base_config, equal_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    bias = bool(config.attention_bias)
    layers = [
        replace(
            kind,
            routed=number not in config.mlp_only_layers
            and config.num_experts > 0
            and (number + 1) % config.decoder_sparse_step == 0,
        )
        for number, kind in enumerate(equal_layers(config, config.sliding_window))
    ]
    return base_config(
        config,
        tuple(layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=Experts(
            config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
        ),
    )
