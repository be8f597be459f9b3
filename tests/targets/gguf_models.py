"""Small random models of every family that is read from GGUF files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gguf_writer import tiny
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from blockdraft.decode.proposal import chain
from blockdraft.targets import Target

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # so that heads * head_dim is not the hidden size
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
NEAR, FAR = "sliding_attention", "full_attention"
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32}


DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
DELTA_NET_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 48,
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
}


CONVOLUTIONS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-3,
    "tie_word_embeddings": True,
}
CONVOLUTION_KEYS = {
    "attention.head_count_kv": [0, 2, 0, 0],
    "attention.key_length": None,
    "attention.value_length": None,
    "shortconv.l_cache": 3,
}


GRANITE_HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.5,
    "logits_scaling": 4.0,
}
MAMBA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
GRANITE_HYBRID_KEYS: dict[str, Any] = MAMBA_KEYS | {
    "attention.head_count_kv": [0, 2, 0],
    "attention.key_length": None,
    "attention.value_length": None,
    "expert_shared_feed_forward_length": 40,
    "embedding_scale": 3.0,
    "residual_scale": 0.25,
    "attention.scale": 0.5,
    "logit_scale": 4.0,
    "rope.scaling.finetuned": False,
}
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_norm_epsilon": 1e-3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "time_step_min": 1e-9,  # transformers' limit of step sizes in prompts
}
NEMOTRON_KEYS: dict[str, Any] = MAMBA_KEYS | {"rope.dimension_count": 8}


GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [NEAR, FAR, NEAR, FAR, NEAR, FAR],
    "sliding_window": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        NEAR: {"rope_type": "default", "rope_theta": 50.0},
        FAR: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    },
}
GEMMA4_KEYS = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 4,
    "attention.sliding_window_pattern": [True, False] * 3,
    "final_logit_softcapping": 3.0,
    "rope.dimension_count": 32,
    "rope.freq_base_swa": 50.0,
}
GEMMA4_FACTORS = {"rope_freqs.weight": np.array([1] * 4 + [1e30] * 12, np.float32)}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "swiglu_limit": 7.0,
}
GPT_OSS_KEYS: dict[str, Any] = {
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 40,
    "attention.sliding_window": 4,
}


def llama3_factors(factor: float, longest: int, theta: float, size: int) -> np.ndarray:
    """Return the factors that llama.cpp's converter writes for Llama 3's rotary embeddings."""
    waves = 2 * math.pi * theta ** (torch.arange(0, size, 2).double() / size)
    smooth = (longest / waves - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(waves < longest / 4, 1.0, torch.where(waves > longest, factor, between)).float().numpy()


def rotary(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}}


LATENT: dict[str, Any] = {
    "head_dim": 8,  # the rotated channels
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT_KEYS: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 12,
    "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 12,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 32,
    "expert_weights_scale": 1.5,
}


# By name: fields that differ from SMALL, further metadata of the file, and further tensors.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]] = {
    "llama": ({}, {}, {}),
    "llama-odd": (
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {},
        {},
    ),
    "llama-linear": (
        rotary(rope_type="linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "llama-old-linear": (rotary(rope_type="linear", factor=4.0), {"rope.scale_linear": 4.0}, {}),
    "llama-unscaled": (rotary(), {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "llama-yarn": (
        rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=20.0),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 20.0,
        },
        {},
    ),
    "llama-llama3": (
        rotary(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        {},
        {"rope_freqs.weight": llama3_factors(4.0, 16, 500.0, 12)},
    ),
    "mistral": ({"sliding_window": None}, {}, {}),
    "qwen2": (
        {"tie_word_embeddings": True, "head_dim": 8},
        {"attention.key_length": None, "attention.value_length": None},
        {},
    ),
    "qwen3": ({}, {"attention.head_count_kv": [2, 2, 2]}, {}),
    "qwen2_moe": (
        EXPERTS | {"head_dim": 8, "norm_topk_prob": False, "shared_expert_intermediate_size": 64},
        EXPERT_KEYS
        | {"expert_shared_feed_forward_length": 64, "attention.key_length": None, "attention.value_length": None},
        {},
    ),
    "qwen2_moe-old": (  # files without the size of experts, which follows from the inner size
        EXPERTS
        | {"head_dim": 8, "norm_topk_prob": False, "intermediate_size": 64, "shared_expert_intermediate_size": 64},
        {"expert_count": 5, "expert_used_count": 2, "attention.key_length": None, "attention.value_length": None},
        {},
    ),
    "qwen3_moe": (EXPERTS | {"norm_topk_prob": True}, EXPERT_KEYS, {}),
    "qwen3_5_text": (
        DELTA_NET | {"head_dim": 16, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        DELTA_NET_KEYS,
        {},
    ),
    "qwen3_next": (
        DELTA_NET
        | EXPERTS
        | {
            "head_dim": 16,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        DELTA_NET_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 64},
        {},
    ),
    "gpt_oss": (
        GPT_OSS | rotary(),
        GPT_OSS_KEYS,
        {},
    ),
    "ministral3": (
        {"head_dim": 8, "sliding_window": None, "max_position_embeddings": 256}
        | rotary(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        {},
    ),
    "gpt_oss-yarn": (
        GPT_OSS
        | {"layer_types": [FAR, NEAR, NEAR]}
        | rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, truncate=False),
        GPT_OSS_KEYS
        | {
            "attention.sliding_window_pattern": [False, True, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 4.0,
        },
        {},
    ),
    "qwen3_5_moe_text": (
        DELTA_NET
        | EXPERTS
        | {
            "head_dim": 16,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        DELTA_NET_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 64},
        {},
    ),
    "deepseek_v2": (
        LATENT | rotary() | {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
        LATENT_KEYS | {"expert_gating_func": 1},
        {},
    ),
    "deepseek_v2-groups": (  # as V2-Lite, whose queries have one projection
        LATENT | rotary() | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        LATENT_KEYS | {"attention.q_lora_rank": None, "expert_group_count": 4, "expert_group_used_count": 2},
        {},
    ),
    "deepseek_v3": (
        LATENT
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
        | rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7),
        LATENT_KEYS
        | {
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_weights_norm": True,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
        {},
    ),
    "glm4_moe_lite": (
        LATENT | rotary() | {"n_shared_experts": 1},
        LATENT_KEYS | {"expert_shared_count": 1, "expert_weights_norm": True},
        {},
    ),
    "gemma": ({"tie_word_embeddings": True}, {}, {}),
    "gemma2": (
        {
            "tie_word_embeddings": True,
            "sliding_window": 4,
            "layer_types": [NEAR, FAR, NEAR],
            "query_pre_attn_scalar": 12,
        }
        | CAPS,
        {"attention.sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {},
    ),
    "gemma3_text": (
        {
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "layer_types": [*[NEAR] * 5, FAR, NEAR],
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                FAR: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                NEAR: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        {
            "attention.sliding_window": 4,
            "rope.freq_base_swa": 50.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "gemma4_text": (
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
        },
        GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
        },
        GEMMA4_FACTORS,
    ),
    "gemma4_text-keys": (
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        GEMMA4_KEYS | {"attention.head_count_kv": [2, 1] * 3, "embedding_length_per_layer_input": 0},
        GEMMA4_FACTORS,
    ),
    "gemma4_text-experts": (
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        GEMMA4_KEYS | EXPERT_KEYS | {"attention.head_count_kv": [2, 1] * 3, "embedding_length_per_layer_input": 0},
        GEMMA4_FACTORS,
    ),
    "granite": (
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.25, "attention.scale": 0.5, "logit_scale": 4.0},
        {},
    ),
    "granitemoehybrid": (
        GRANITE_HYBRID | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
        GRANITE_HYBRID_KEYS | EXPERT_KEYS,
        {},
    ),
    "granitemoehybrid-dense": (
        GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"} | rotary(),
        GRANITE_HYBRID_KEYS | {"feed_forward_length": 40, "rope.scaling.finetuned": None},
        {},
    ),
    "nemotron_h": (
        NEMOTRON
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]}
        | {"n_routed_experts": 5, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64},
        NEMOTRON_KEYS
        | EXPERT_KEYS
        | {"attention.head_count_kv": [0, 0, 2, 0, 0], "feed_forward_length": [0, 32, 0, 32, 0]}
        | {"expert_shared_feed_forward_length": 64, "expert_weights_scale": 2.5, "expert_group_count": 1}
        | {"expert_weights_norm": True},
        {},
    ),
    "nemotron_h-dense": (
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        NEMOTRON_KEYS | {"attention.head_count_kv": [0, 0, 2, 0, 0], "feed_forward_length": [0, 40, 0, 40, 0]},
        {},
    ),
    "lfm2": (CONVOLUTIONS, CONVOLUTION_KEYS, {}),
    "lfm2_moe": (
        CONVOLUTIONS | EXPERTS | {"num_dense_layers": 2},
        CONVOLUTION_KEYS | EXPERT_KEYS | {"leading_dense_block_count": 2, "expert_gating_func": 2},
        {},
    ),
    "olmo2": ({}, {}, {}),
    "olmo3": (
        {
            "sliding_window": 4,
            "layer_types": [NEAR, FAR, NEAR],
            "rope_parameters": {
                FAR: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
                NEAR: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
        {},
    ),
    "phi3": (
        {"head_dim": 8, "sliding_window": 4},
        {"attention.sliding_window": 4, "attention.key_length": None, "attention.value_length": None},
        {},
    ),
    "phi3-long": (
        {
            "head_dim": 8,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 128,
            **rotary(
                rope_type="longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.5, 2.0],
                long_factor=[1.0, 4.0, 8.0],
                original_max_position_embeddings=64,
            ),
        },
        {
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.sliding_window": 0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(64)),
        },
        {
            "rope_factors_short.weight": np.array([1, 1.5, 2], np.float32),
            "rope_factors_long.weight": np.array([1, 4, 8], np.float32),
        },
    ),
    "smollm3": ({"head_dim": 8, "num_hidden_layers": 5, "tie_word_embeddings": True}, {}, {}),
    "gemma3_text-pattern": (
        {"sliding_window": 4, "layer_types": [NEAR, FAR, FAR], "query_pre_attn_scalar": 12},
        {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False, False]},
        {},
    ),
}


def model_of(name: str, **differences: Any) -> PreTrainedModel:
    fields = SMALL | MODELS[name][0] | differences
    if "hidden_size_per_layer_input" in fields:
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    return tiny(AutoConfig.for_model(name.partition("-")[0], **fields))


def scores(target: Target, tokens: Tensor) -> Tensor:
    cache = target.new_cache(1, tokens.size(1))
    return target.forward(tokens, chain(tokens).parents, cache).logits
