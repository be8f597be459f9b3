"""Shapes of known models, and GGUF files of random weights with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

# Bytes to set in each block: the place, and the factor that makes weights of about 0.02.
SCALES: dict[str, dict[int, np.ndarray]] = {
    "Q4_K": {0: np.array([1e-4], "<f2"), 2: np.array([6e-4], "<f2")},
    "Q5_K": {0: np.array([5e-5], "<f2"), 2: np.array([6e-4], "<f2")},
    "Q6_K": {208: np.array([2e-5], "<f2")},
    "Q5_0": {0: np.array([2e-3], "<f2")},
    "Q8_0": {0: np.array([3e-4], "<f2")},
    "MXFP4": {0: np.array([120], "<u1")},
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # types and shapes by names


@dataclass(frozen=True)
class Shape:
    """Shapes of a known model.

    Args:
        architecture: As in llama.cpp.
        metadata: Keys without the architecture; floats are stored as float32, integers as uint32.
        tensors: Tensors outside of the layers.
        layer: Returns the tensors of a layer by its number, without `blk.N.`.
        default_layers: Layers to write, unless others are asked for.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: Tensors
    layer: Callable[[int], Tensors]
    default_layers: int


def attention(kind: str, hidden: int, heads: int, kv_heads: int, head_dim: int, kind_of_values: str = "") -> Tensors:
    return {
        "attn_q.weight": (kind, (heads * head_dim, hidden)),
        "attn_k.weight": (kind, (kv_heads * head_dim, hidden)),
        "attn_v.weight": (kind_of_values or kind, (kv_heads * head_dim, hidden)),
        "attn_output.weight": (kind, (hidden, heads * head_dim)),
    }


def vectors(*sizes: tuple[str, int]) -> Tensors:
    return {name: ("F32", (size,)) for name, size in sizes}


def qwen3_layer(layer: int) -> Tensors:
    hidden, experts, inner = 2048, 128, 768
    return {
        **attention("Q4_K", hidden, 32, 4, 128, "Q6_K"),
        **vectors(("attn_norm.weight", hidden), ("ffn_norm.weight", hidden)),
        **vectors(("attn_q_norm.weight", 128), ("attn_k_norm.weight", 128)),
        "ffn_gate_inp.weight": ("F32", (experts, hidden)),
        "ffn_gate_exps.weight": ("Q4_K", (experts, inner, hidden)),
        "ffn_up_exps.weight": ("Q4_K", (experts, inner, hidden)),
        "ffn_down_exps.weight": ("Q6_K", (experts, hidden, inner)),
    }


def gpt_oss_layer(layer: int) -> Tensors:
    hidden, heads, kv_heads, size, experts = 2880, 64, 8, 64, 32
    biases = {"attn_q": heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size, "attn_output": hidden}
    parts = ("gate", "up", "down")
    return {
        **attention("Q8_0", hidden, heads, kv_heads, size),
        **vectors(*((f"{name}.bias", count) for name, count in biases.items())),
        **vectors(("attn_norm.weight", hidden), ("post_attention_norm.weight", hidden), ("attn_sinks.weight", heads)),
        "ffn_gate_inp.weight": ("F32", (experts, hidden)),
        "ffn_gate_inp.bias": ("F32", (experts,)),
        **{f"ffn_{part}_exps.weight": ("MXFP4", (experts, hidden, hidden)) for part in parts},
        **{f"ffn_{part}_exps.bias": ("F32", (experts, hidden)) for part in parts},
    }


LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)  # layers of LFM2-1.2B with attention


def lfm2_layer(layer: int) -> Tensors:
    hidden, inner = 2048, 8192
    tensors = vectors(("attn_norm.weight", hidden), ("ffn_norm.weight", hidden)) | {
        "ffn_gate.weight": ("Q4_K", (inner, hidden)),
        "ffn_up.weight": ("Q4_K", (inner, hidden)),
        "ffn_down.weight": ("Q6_K", (hidden, inner)),
    }
    if layer in LFM2_ATTENTION:
        norms = vectors(("attn_q_norm.weight", 64), ("attn_k_norm.weight", 64))
        return tensors | norms | attention("Q4_K", hidden, 32, 8, 64, "Q6_K")
    return tensors | {
        "shortconv.conv.weight": ("F32", (hidden, 3)),
        "shortconv.in_proj.weight": ("Q4_K", (3 * hidden, hidden)),
        "shortconv.out_proj.weight": ("Q4_K", (hidden, hidden)),
    }


def mlp(hidden: int, inner: int) -> Tensors:
    norms = vectors(("attn_norm.weight", hidden), ("post_attention_norm.weight", hidden))
    up = {f"ffn_{part}.weight": ("Q4_K", (inner, hidden)) for part in ("gate", "up")}
    return {**norms, **up, "ffn_down.weight": ("Q6_K", (hidden, inner))}


def qwen3_5_layer(hidden: int, inner: int, heads: int, kv_heads: int, value_heads: int) -> Callable[[int], Tensors]:
    """Return the layers of Qwen3.5: three gated delta nets, then one with attention."""
    values, channels = value_heads * 128, 2 * 16 * 128 + value_heads * 128

    def layer(number: int) -> Tensors:
        if number % 4 == 3:
            own = attention("Q4_K", hidden, heads, kv_heads, 256, "Q6_K")
            own["attn_q.weight"] = ("Q4_K", (2 * heads * 256, hidden))  # with gates
            return {**mlp(hidden, inner), **own, **vectors(("attn_q_norm.weight", 256), ("attn_k_norm.weight", 256))}
        return {
            **mlp(hidden, inner),
            "attn_qkv.weight": ("Q5_K", (channels, hidden)),
            "attn_gate.weight": ("Q4_K", (values, hidden)),
            **{f"ssm_{part}.weight": ("Q8_0", (value_heads, hidden)) for part in ("alpha", "beta")},
            "ssm_conv1d.weight": ("F32", (channels, 4)),
            **vectors(("ssm_dt.bias", value_heads), ("ssm_a", value_heads), ("ssm_norm.weight", 128)),
            "ssm_out.weight": ("Q4_K", (hidden, values)),
        }

    return layer


def qwen3_5_sizes(hidden: int, inner: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    return sizes(hidden, heads, kv_heads, 256) | {
        "context_length": 32768,
        "feed_forward_length": inner,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * 128,
        "full_attention_interval": 4,
    }


QWEN3_5_08B, QWEN3_5_2B, QWEN3_5_4B = (1024, 3584, 8, 2, 16), (2048, 6144, 8, 2, 16), (2560, 9216, 16, 4, 32)
SMALL_VOCABULARY = 8192  # so that the layers take nearly all of the time


def qwen3_layer_of_06b(layer: int) -> Tensors:
    return {
        **{name: own for name, own in mlp(1024, 3072).items() if name != "post_attention_norm.weight"},
        **attention("Q4_K", 1024, 16, 8, 128, "Q6_K"),
        "ffn_norm.weight": ("F32", (1024,)),
        **vectors(("attn_q_norm.weight", 128), ("attn_k_norm.weight", 128)),
    }


def qwen3_next_layer(number: int) -> Tensors:
    """Return a layer of Qwen3-Coder-Next: Qwen3.5's, with two gates in one matrix, and experts."""
    hidden, experts, inner, value_heads = 2048, 512, 512, 32
    left_out = ("ffn_", "ssm_alpha", "ssm_beta")
    layer = qwen3_5_layer(hidden, 0, 16, 2, value_heads)(number)
    own = {name: tensor for name, tensor in layer.items() if not name.startswith(left_out)}
    if number % 4 != 3:
        own["ssm_ba.weight"] = ("Q8_0", (2 * value_heads, hidden))
    for part, kind, sizes in (
        ("gate", "Q4_K", (inner, hidden)),
        ("up", "Q4_K", (inner, hidden)),
        ("down", "Q6_K", (hidden, inner)),
    ):
        own |= {f"ffn_{part}_exps.weight": (kind, (experts, *sizes)), f"ffn_{part}_shexp.weight": (kind, sizes)}
    return {
        **own,
        "ffn_gate_inp.weight": ("F32", (experts, hidden)),
        "ffn_gate_inp_shexp.weight": ("F32", (hidden,)),
    }


# Layers of Nemotron 3 Nano: Mamba-2 (M), experts (E) and attention (*).
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def nemotron_layer(number: int) -> Tensors:
    """Return a layer of Nemotron 3 Nano. Rows of 2,688 numbers hold no whole blocks of Q4_K or Q6_K."""
    hidden, heads, values, groups, state, experts, inner = 2688, 64, 4096, 8, 128, 128, 1856
    norm, kind = vectors(("attn_norm.weight", hidden)), NEMOTRON[number]
    if kind == "*":
        return norm | attention("Q5_0", hidden, 32, 2, 128, "Q8_0") | {"attn_output.weight": ("Q4_K", (hidden, 4096))}
    if kind == "E":
        return {
            **norm,
            "ffn_gate_inp.weight": ("F32", (experts, hidden)),
            "exp_probs_b.bias": ("F32", (experts,)),
            "ffn_up_exps.weight": ("Q5_0", (experts, inner, hidden)),
            "ffn_down_exps.weight": ("Q8_0", (experts, hidden, inner)),
            "ffn_up_shexp.weight": ("Q5_0", (2 * inner, hidden)),
            "ffn_down_shexp.weight": ("Q8_0", (hidden, 2 * inner)),
        }
    channels = values + 2 * groups * state
    return {
        **norm,
        "ssm_in.weight": ("Q5_0", (values + channels + heads, hidden)),
        "ssm_out.weight": ("Q4_K", (hidden, values)),
        "ssm_conv1d.weight": ("F32", (channels, 4)),
        **vectors(("ssm_conv1d.bias", channels), ("ssm_dt.bias", heads)),
        **{f"ssm_{part}": ("F32", (heads, 1)) for part in "ad"},
        "ssm_norm.weight": ("F32", (groups, values // groups)),
    }


def glm_flash_layer(number: int) -> Tensors:
    """Return a layer of GLM-4.7-Flash: latent attention, then an MLP in the first layer and experts in others."""
    hidden, heads, query, latent, rotated, plain, value = 2048, 20, 768, 512, 64, 192, 256
    own: Tensors = {
        **vectors(("attn_norm.weight", hidden), ("ffn_norm.weight", hidden)),
        **vectors(("attn_q_a_norm.weight", query), ("attn_kv_a_norm.weight", latent)),
        "attn_q_a.weight": ("Q4_K", (query, hidden)),
        "attn_q_b.weight": ("Q4_K", (heads * (plain + rotated), query)),
        "attn_kv_a_mqa.weight": ("Q4_K", (latent + rotated, hidden)),
        "attn_k_b.weight": ("Q5_0", (heads, latent, plain)),
        "attn_v_b.weight": ("Q4_K", (heads, value, latent)),
        "attn_output.weight": ("Q4_K", (hidden, heads * value)),
    }
    parts = (("gate", "Q4_K"), ("up", "Q4_K"), ("down", "Q6_K"))

    def mlp_of(name: str, inner: int, *experts: int) -> Tensors:
        return {
            f"ffn_{part}{name}.weight": (kind, (*experts, *((hidden, inner) if part == "down" else (inner, hidden))))
            for part, kind in parts
        }

    if number == 0:
        return own | mlp_of("", 10240)
    router: Tensors = {"ffn_gate_inp.weight": ("F32", (64, hidden)), "exp_probs_b.bias": ("F32", (64,))}
    return own | router | mlp_of("_exps", 1536, 64) | mlp_of("_shexp", 1536)


GRANITE_ATTENTION = (5, 15, 25, 35)  # layers of Granite 4-H-1B with attention


def granite_hybrid_layer(layer: int) -> Tensors:
    hidden, inner, heads, values, state = 1536, 4096, 48, 3072, 128
    tensors = {name: own for name, own in mlp(hidden, inner).items() if name != "post_attention_norm.weight"}
    tensors |= vectors(("ffn_norm.weight", hidden))
    if layer in GRANITE_ATTENTION:
        return tensors | attention("Q4_K", hidden, 12, 4, 128, "Q6_K")
    channels = values + 2 * state
    return tensors | {
        "ssm_in.weight": ("Q4_K", (values + channels + heads, hidden)),
        "ssm_out.weight": ("Q4_K", (hidden, values)),
        "ssm_conv1d.weight": ("F32", (channels, 4)),
        **vectors(("ssm_conv1d.bias", channels), ("ssm_dt.bias", heads)),
        **{f"ssm_{part}": ("F32", (heads, 1)) for part in "ad"},
        "ssm_norm.weight": ("F32", (1, values)),
    }


def sizes(hidden: int, heads: int, kv_heads: int | list[int], head_dim: int, **others: Any) -> dict[str, Any]:
    return {
        "context_length": 4096,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **others,
    }


def tables(kinds: tuple[str, str], vocabulary: int, hidden: int) -> Tensors:
    names = ("token_embd.weight", "output.weight")
    return {name: (kind, (vocabulary, hidden)) for name, kind in zip(names, kinds, strict=True)}


SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        sizes(2048, 32, 4, 128)
        | {"feed_forward_length": 768, "expert_feed_forward_length": 768, "expert_count": 128, "expert_used_count": 8}
        | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6},
        tables(("Q4_K", "Q6_K"), 151936, 2048) | vectors(("output_norm.weight", 2048)),
        qwen3_layer,
        4,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        sizes(2880, 64, 8, 64)
        | {"feed_forward_length": 2880, "expert_feed_forward_length": 2880, "expert_count": 32, "expert_used_count": 4}
        | {"rope.freq_base": 150000.0, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128}
        | {
            "context_length": 131072,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        tables(("Q8_0", "Q8_0"), 201088, 2880) | vectors(("output_norm.weight", 2880)),
        gpt_oss_layer,
        12,
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        sizes(2048, 32, [8 if layer in LFM2_ATTENTION else 0 for layer in range(16)], 64)
        | {"feed_forward_length": 8192, "shortconv.l_cache": 3, "vocab_size": 65536}
        | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5},
        {"token_embd.weight": ("Q6_K", (65536, 2048)), **vectors(("token_embd_norm.weight", 2048))},
        lfm2_layer,
        16,
    ),
    "qwen3.5-0.8b": Shape(
        "qwen35",
        qwen3_5_sizes(*QWEN3_5_08B),
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1024)), **vectors(("output_norm.weight", 1024))},
        qwen3_5_layer(*QWEN3_5_08B),
        24,
    ),
    "qwen3.5-2b": Shape(
        "qwen35",
        qwen3_5_sizes(*QWEN3_5_2B),
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 2048)), **vectors(("output_norm.weight", 2048))},
        qwen3_5_layer(*QWEN3_5_2B),
        24,
    ),
    "qwen3.5-4b": Shape(
        "qwen35",
        qwen3_5_sizes(*QWEN3_5_4B),
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 2560)), **vectors(("output_norm.weight", 2560))},
        qwen3_5_layer(*QWEN3_5_4B),
        8,
    ),
    "granite-4-h-1b": Shape(
        "granitehybrid",
        sizes(1536, 12, [4 if layer in GRANITE_ATTENTION else 0 for layer in range(40)], 128)
        | {"context_length": 32768, "feed_forward_length": 4096, "expert_shared_feed_forward_length": 4096}
        | {"rope.dimension_count": 128, "rope.scaling.finetuned": False, "attention.layer_norm_rms_epsilon": 1e-5}
        | {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1}
        | {"ssm.time_step_rank": 48, "ssm.inner_size": 3072},
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1536)), **vectors(("output_norm.weight", 1536))},
        granite_hybrid_layer,
        40,
    ),
    "qwen3-coder-next": Shape(
        "qwen3next",
        {name: value for name, value in qwen3_5_sizes(2048, 512, 16, 2, 32).items() if "sections" not in name}
        | {"expert_count": 512, "expert_used_count": 10, "expert_feed_forward_length": 512}
        | {"expert_shared_feed_forward_length": 512},
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 2048)), **vectors(("output_norm.weight", 2048))},
        qwen3_next_layer,
        4,
    ),
    "nemotron-3-nano": Shape(
        "nemotron_h_moe",
        sizes(2688, 32, [2 if kind == "*" else 0 for kind in NEMOTRON], 128)
        | {"context_length": 32768, "feed_forward_length": [1856 if kind == "E" else 0 for kind in NEMOTRON]}
        | {"rope.dimension_count": 128}
        | {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 8}
        | {"ssm.time_step_rank": 64, "ssm.inner_size": 4096}
        | {"expert_count": 128, "expert_used_count": 6, "expert_shared_count": 1, "expert_group_count": 1}
        | {"expert_feed_forward_length": 1856, "expert_shared_feed_forward_length": 3712}
        | {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_gating_func": 2},
        tables(("Q8_0", "Q8_0"), SMALL_VOCABULARY, 2688) | vectors(("output_norm.weight", 2688)),
        nemotron_layer,
        6,
    ),
    "glm-4.7-flash": Shape(
        "deepseek2",
        sizes(2048, 20, 1, 576)
        | {"context_length": 32768, "feed_forward_length": 10240, "attention.value_length": 512}
        | {"attention.key_length_mla": 256, "attention.value_length_mla": 256, "attention.kv_lora_rank": 512}
        | {"attention.q_lora_rank": 768, "rope.dimension_count": 64, "leading_dense_block_count": 1}
        | {"expert_count": 64, "expert_used_count": 4, "expert_shared_count": 1, "expert_feed_forward_length": 1536}
        | {"expert_weights_norm": True, "expert_weights_scale": 1.8, "expert_gating_func": 2}
        | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5},
        tables(("Q4_K", "Q6_K"), SMALL_VOCABULARY, 2048) | vectors(("output_norm.weight", 2048)),
        glm_flash_layer,
        4,
    ),
    "qwen3-0.6b": Shape(
        "qwen3",
        sizes(1024, 16, 8, 128)
        | {"context_length": 32768, "feed_forward_length": 3072, "rope.freq_base": 1e6}
        | {"attention.layer_norm_rms_epsilon": 1e-6},
        {"token_embd.weight": ("Q6_K", (SMALL_VOCABULARY, 1024)), **vectors(("output_norm.weight", 1024))},
        qwen3_layer_of_06b,
        28,
    ),
}


def random_values(kind: str, shape: tuple[int, ...], numbers: np.random.Generator) -> np.ndarray:
    """Return random weights, quantized ones as bytes `[..., out, bytes]` uint8."""
    if kind == "F32":
        is_vector = max(shape) == math.prod(shape)
        return numbers.standard_normal(shape, dtype=np.float32) / 20 + (1 if is_vector else 0)
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.frombuffer(numbers.bytes(math.prod(shape) // values * size), np.uint8).copy()
    blocks = blocks.reshape(*shape[:-1], shape[-1] // values, size)
    for place, scale in SCALES[kind].items():
        blocks[..., place : place + scale.itemsize] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_model(path: Path, shape: Shape, layers: int) -> None:
    """Write a model of random weights, of which one tensor at a time is in memory."""
    writer, numbers = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(1)
    writer.add_tokenizer_model("no_vocab")
    vocabulary = {"vocab_size": shape.tensors["token_embd.weight"][1][0]}
    for name, value in {"block_count": layers, **vocabulary, **shape.metadata}.items():
        key, kind = f"{shape.architecture}.{name}", type(value)
        if kind is list:
            writer.add_array(key, value[:layers] if len(value) >= layers else value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[kind](key, value)
    tensors = dict(shape.tensors)
    for layer in range(layers):
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in shape.layer(layer).items()}
    for name, (kind, own) in tensors.items():
        number = GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[number]
        row = own if kind == "F32" else (*own[:-1], own[-1] // values * size)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, row, dtype, math.prod(row) * dtype.itemsize, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (kind, own) in tensors.items():
        values = random_values(kind, own, numbers)
        writer.write_tensor_data(-values if name.endswith("ssm_a") else values)
    writer.close()
