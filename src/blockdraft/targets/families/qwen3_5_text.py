"""Qwen3.5, text alone: gated delta nets in most layers, and in the others attention that rotates a part of each head
and has a gate on what it says."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from blockdraft.nn.decoder_config import DecoderConfig, DeltaNet, LayerKind
from blockdraft.targets.families.base import NotCovered, base_config, rope

HAS_OTHER_PARTS = True


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    own, bias = rope(config, default=Qwen3_5TextRotaryEmbedding), bool(config.attention_bias)
    kinds = {"full_attention": LayerKind(own), "linear_attention": LayerKind(own, recurrent=True)}
    if unknown := set(config.layer_types) - set(kinds):
        raise NotCovered(f"it has layers of the kinds {', '.join(sorted(unknown))}")
    if config.hidden_act != "silu":
        raise NotCovered(f"its activation {config.hidden_act} is not silu, which its delta nets know alone")
    return base_config(
        config,
        tuple(kinds[name] for name in config.layer_types),
        rotates_all=False,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_plus_one=True,
        gated=True,
        delta_net=DeltaNet(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        ),
    )
