"""8-bit weights on a GPU, by torchao. Inputs are never quantized, because a block would change the tokens in it."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from blockdraft.nn.decoder import Decoder
from blockdraft.nn.packed import PackedLinear

EXTRA = 'pip install "blockdraft[gpu]"'
FP8_CAPABILITY = (8, 9)  # the first GPUs that compute in fp8


def why_not_rounded(kind: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why weights cannot be quantized to `kind`, or None if they can."""
    if kind == "fp8" and device.type != "cuda":
        return f"fp8 weights need an NVIDIA GPU, and the device is {device}; use int8"
    if dtype != torch.bfloat16:
        return f"{kind} weights on a GPU are for bfloat16 arithmetic, and the dtype is {str(dtype).split('.')[-1]}"
    if find_spec("torchao") is None:
        return f"{kind} weights on a GPU need torchao, which is not installed: {EXTRA}"
    if kind == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        own, needed = torch.cuda.get_device_capability(device), FP8_CAPABILITY
        return f"fp8 weights need compute capability {needed[0]}.{needed[1]}, and {device} has {own[0]}.{own[1]}"
    return None


def round_weights(decoder: Decoder, kind: str) -> None:
    """Quantize the weights of all products to "int8" or "fp8", with one factor per output.

    The embedding table, and a head that shares it, are not quantized.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[kind]
    for layer in decoder.modules():
        if isinstance(layer, PackedLinear) and layer is not decoder.embedding:
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(layer.stored, requires_grad=False)
            quantize_(linear, config(set_inductor_config=False))
            layer.stored, layer.rounded = linear.weight.detach(), kind
