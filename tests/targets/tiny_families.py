"""A tiny random model of every family that is tested through transformers, with the tokens of `tiny_tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 265
LOUD = 7  # tokens that are far likelier than others, so that random draft tokens are accepted now and then
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 6}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA_NET = HYBRID | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}

ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "gemma2": MIXED | {"query_pre_attn_scalar": 8},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 8},
    "gemma4_text": WINDOW
    | {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_theta": 1e4}},
    "phi3": WINDOW,
    "olmo2": {},
    "glm4": {},
    "deepseek_v3": EXPERTS
    | {
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": SHARED | DELTA_NET,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": SHARED | DELTA_NET,
    "olmo_hybrid": DELTA_NET,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": HYBRID
    | MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
}
FAMILIES = ATTENTION | RECURRENT
# Keys of config.json that mlx-lm wants, as published checkpoints have them, and transformers 5 does not write.
MLX_KEYS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma4_text": {"global_head_dim": 16, "use_double_wide_mlp": False},
}


def make_model(family: str) -> PreTrainedModel:
    """Return the tiny model of a family, the same at each call."""
    fields = {name: value for name, value in (SMALL | FAMILIES[family]).items() if name != "head_dim" or value}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        for parameter in model.parameters():  # default weights are so small that every model is nearly the identity
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.get_output_embeddings().weight.data[LOUD:] *= 0.1
    return model.eval()


def write_model(family: str, folder: Path, for_mlx: bool = False) -> Path:
    """Save the model; returns the folder.

    Args:
        for_mlx: Write what mlx-lm reads: `MLX_KEYS`, no head where it knows tied ones only, and experts one by one.
    """
    model = make_model(family)
    if for_mlx and family == "gemma2":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    if for_mlx and family == "gpt_oss":
        tensors = load_file(folder / "model.safetensors")
        save_file(dict(mlx_experts(tensors)), folder / "model.safetensors", {"format": "pt"})
    if for_mlx:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | MLX_KEYS.get(family, {})
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def mlx_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of gpt-oss by mlx-lm's names. Published experts are in few bits, and mlx-lm takes these apart itself."""
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".experts.")
        kind = "bias" if part.endswith("_bias") else "weight"
        tensor = tensor if kind == "bias" or not part else tensor.mT
        of_outputs = (slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))
        if part.startswith("gate_up_proj"):
            for own, outputs in zip(("gate_proj", "up_proj"), of_outputs, strict=True):
                yield f"{layer}.experts.{own}.{kind}", tensor[outputs].contiguous()
        else:
            yield f"{layer}.experts.down_proj.{kind}" if part else name, tensor.contiguous()
