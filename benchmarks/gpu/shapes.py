"""Targets and drafters of published shapes, with random weights made on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from blockdraft.cuda.graphs import CudaRecorder
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.targets import Target
from blockdraft.targets.families import NotCovered, decoder_config
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.native_target import NativeTarget

WEIGHT_SCALE = 0.02


@dataclass(frozen=True)
class Shape:
    """A target and its drafter.

    Attributes:
        taus: Published tokens per target forward of this pair, greedy, by method and task, with their source.
    """

    target: PretrainedConfig
    draft_layers: int
    taps: tuple[int, ...]
    block_size: int = 16
    taus: tuple[tuple[str, str, float, str], ...] = ()


def _qwen3(kind: type[PretrainedConfig], **sizes: Any) -> PretrainedConfig:
    common = {"rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    return kind(**common | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | sizes)


def _dense(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> PretrainedConfig:
    """A dense Qwen3 as it was published."""
    return _qwen3(
        Qwen3Config,
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        **others,
    )


_DFLASH = "DFlash, arXiv 2602.06036, Qwen3-8B, temperature 0"
_DFLASH_4B = "DFlash, arXiv 2602.06036, Qwen3-4B, temperature 0"
SHAPES = {
    "tiny": Shape(
        _qwen3(
            Qwen3Config,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        draft_layers=1,
        taps=(0, 2),
        taus=(("dflash", "an example", 4.5, "made up"),),
    ),
    "tiny-moe": Shape(
        _qwen3(
            Qwen3MoeConfig,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
        draft_layers=1,
        taps=(0, 2),
    ),
    # No drafters of these two sizes were published; they get those of the 4B.
    "qwen3-0.6b": Shape(
        _dense(1024, 3072, 28, 16, tie_word_embeddings=True),
        draft_layers=5,
        taps=(1, 7, 13, 19, 25),
        taus=(("dflash", "GSM8K", 6.53, _DFLASH_4B),),
    ),
    "qwen3-1.7b": Shape(
        _dense(2048, 6144, 28, 16, tie_word_embeddings=True),
        draft_layers=5,
        taps=(1, 7, 13, 19, 25),
        taus=(("dflash", "GSM8K", 6.53, _DFLASH_4B),),
    ),
    "qwen3-4b": Shape(
        _dense(2560, 9728, 36, 32, tie_word_embeddings=True),
        draft_layers=5,
        taps=(1, 9, 17, 25, 33),
        taus=(("dflash", "GSM8K", 6.53, _DFLASH_4B),),
    ),
    "qwen3-8b": Shape(
        _dense(4096, 12288, 36, 32),
        draft_layers=5,
        taps=(1, 9, 17, 25, 33),
        taus=(
            ("dflash", "GSM8K", 6.54, _DFLASH),
            ("dflash", "MATH-500", 7.87, _DFLASH),
            ("dflash", "HumanEval", 6.50, _DFLASH),
            ("dflash", "MT-Bench", 4.24, _DFLASH),
        ),
    ),
    "qwen3-30b-a3b": Shape(
        _qwen3(
            Qwen3MoeConfig,
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        draft_layers=8,
        taps=(1, 12, 23, 34, 45),
        taus=(("dflash", "HumanEval", 8.09, "DFlash, arXiv 2602.06036, Qwen3-Coder-30B-A3B, temperature 0"),),
    ),
}


def draft_config(shape: Shape) -> DraftConfig:
    """Of a drafter whose layers are those of its target."""
    config = shape.target
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=shape.draft_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=shape.block_size,
        mask_token_id=config.vocab_size - 1,
        taps=shape.taps,
        num_target_layers=config.num_hidden_layers,
        rope_theta=1e6,
        layers=(LayerAttention(causal=False, window=None),) * shape.draft_layers,
        max_position_embeddings=config.max_position_embeddings,
    )


def build(shape: Shape, backend: str, dtype: torch.dtype, device: torch.device) -> tuple[Target, DFlashDrafter]:
    """The pair, seeded; on the device from the beginning, since weights of this size are not to be moved.

    Args:
        backend: "hf", "native", or "captured", which is native with CUDA graphs.

    Raises:
        ValueError: The backend does not know the family, or cannot be had on the device.
    """
    torch.manual_seed(0)
    config = shape.target
    if backend == "captured" and device.type != "cuda":
        raise ValueError(f"CUDA graphs need an NVIDIA GPU, and the device is {device}")
    target: Target
    if backend == "hf":
        with torch.device(device):
            target = HFTarget(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
    else:
        target = _native(config, dtype, device)
        if backend == "captured":
            target.capture(CudaRecorder(device))
    return target, DFlashDrafter(DFlashNetwork(draft_config(shape)), target)


def _native(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> NativeTarget:
    try:
        wanted = decoder_config(config)
    except NotCovered as reason:
        raise ValueError(f"backend is 'native', which does not know this family ({reason}); use hf.") from reason
    shapes = wanted.tensor_shapes()

    def weight(name: str) -> torch.Tensor:
        scale = WEIGHT_SCALE if len(shapes[name]) > 1 else 0.0
        return torch.randn(shapes[name], dtype=dtype, device=device) * scale + float(len(shapes[name]) == 1)

    return NativeTarget(Decoder(wanted, weight), config)


def bytes_per_token(target: Target, config: PretrainedConfig, context: int) -> float:
    """What one plain step has to read: the weights that take part in it, and the keys and values of the context.

    Of an embedding table that is not the head one row is read, and of the experts those that a token is sent to.
    """
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    total = 0.0
    for name, tensor in target.named_weights():
        if "embed" in name and not config.tie_word_embeddings:
            continue
        total += math.prod(tensor.shape) * tensor.element_size() * (share if ".experts." in name else 1.0)
    return total + target.cache_bytes(1, context)
