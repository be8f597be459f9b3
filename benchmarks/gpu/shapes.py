"""Targets and drafters of published shapes, with random weights made on the device."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.kernels.cuda.compiler import Compiler
from blockdraft.kernels.cuda.graphs import CudaRecorder
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.targets import NotCovered, Target, decoder_config
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.native import NativeTarget

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

WEIGHT_SCALE = 0.02
# What all Qwen3 have in common, unless a shape says otherwise.
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
QWEN3 |= {"max_position_embeddings": 40960, "tie_word_embeddings": False}
QWEN3 |= dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))


@dataclass(frozen=True)
class Shape:
    """A target and its drafter.

    Attributes:
        taus: Published tokens per target forward of this pair, greedy: method, task, tau and source.
    """

    target: PretrainedConfig
    draft_layers: int
    target_layers: tuple[int, ...]
    block_size: int = 16
    taus: tuple[tuple[str, str, float, str], ...] = ()


def read_shapes(file: Path) -> dict[str, Shape]:
    found = {}
    for name, values in tomllib.loads(file.read_text(encoding="utf-8")).items():
        sizes, moe = QWEN3 | values.pop("target"), values.pop("moe", {})
        target = Qwen3MoeConfig(**sizes | moe) if moe else Qwen3Config(**sizes)
        found[name] = Shape(target, **{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    return found


SHAPES = read_shapes(Path(__file__).with_name("shapes.toml"))


def draft_config(shape: Shape) -> DraftConfig:
    """Return the configuration of a drafter whose layers have the shape of its target's."""
    config = shape.target
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return DraftConfig(
        **{name: getattr(config, name) for name in (*sizes, "max_position_embeddings")},
        num_hidden_layers=shape.draft_layers,
        block_size=shape.block_size,
        mask_token_id=config.vocab_size - 1,
        target_layers=shape.target_layers,
        num_target_layers=config.num_hidden_layers,
        rope_theta=1e6,
        layers=(LayerAttention(causal=False, window=None),) * shape.draft_layers,
    )


def build(shape: Shape, backend: str, dtype: torch.dtype, device: torch.device) -> tuple[Target, DFlashDrafter]:
    """Make the pair, seeded, directly on the device.

    Args:
        backend: "hf", "native", "captured", which is native with CUDA graphs, or "compiled", which is captured with
            layers that torch.compile has compiled.

    Raises:
        ValueError: The backend does not know the family, or cannot be had on the device.
    """
    torch.manual_seed(0)
    config = shape.target
    captured = backend in ("captured", "compiled")
    if captured and device.type != "cuda":
        raise ValueError(f"CUDA graphs need an NVIDIA GPU, and the device is {device}")
    target: Target
    if backend == "hf":
        with torch.device(device):
            target = HFTarget(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
    else:
        target = _native(config, dtype, device)
        if captured:
            compiler = Compiler(device, in_background=False) if backend == "compiled" else None
            target.capture(CudaRecorder(device), compiler)
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
    """Return the bytes that one plain step reads: the weights that take part in it and the KV cache of the context.

    Of an embedding table that is not the head one row is read, and of the experts those that a token is sent to.
    """
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    total = 0.0
    for name, tensor in target.named_weights():
        if "embed" in name and not config.tie_word_embeddings:
            continue
        total += math.prod(tensor.shape) * tensor.element_size() * (share if ".experts." in name else 1.0)
    return total + target.cache_bytes(1, context)
