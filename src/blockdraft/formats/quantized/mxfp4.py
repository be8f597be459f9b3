"""MXFP4, the layout of gpt-oss: experts in 4-bit floating-point numbers with an exponent for each 32 inputs.

`X_blocks` is uint8 `[experts, out, in / 32, 16]`, two numbers of E2M1 in a byte, the first in the low half; `X_scales`
uint8 `[experts, out, in / 32]` are exponents of two plus 127. Of `gate_up_proj`, gates are the even outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from blockdraft.formats.quantized.base import check, modules, part_of
from blockdraft.formats.stored import FEW_BITS, MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight, narrow

GROUP = 32
HALVED = 128  # subtracted from exponents: those are of the numbers of E2M1, and codes are twice as large
PARTS = {"gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}}


def weights(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the weights of experts one by one, such as `experts.3.gate_proj.weight`."""
    dense = dict[str, StoredTensor]()
    for module in modules((name.replace("_blocks", ".blocks") for name in tensors), "blocks"):
        prefix, _, projection = module.rpartition(".")
        experts, outputs, groups = (*tensors[f"{module}_blocks"].shape, 0, 0, 0)[:3]
        blocks = part_of(tensors, f"{module}_blocks", ["U8"], (experts, outputs, groups, GROUP // 2))
        scales = part_of(tensors, f"{module}_scales", ["U8"], (experts, outputs, groups))
        check(experts > 0 and outputs > 0 and groups > 0, f"{module}_blocks is empty")
        for name, part in PARTS.get(projection, {projection: slice(None)}).items():
            shape = len(range(*part.indices(outputs))), groups * GROUP
            for expert in range(experts):
                read = partial(_read, blocks, scales, expert, part)
                dense[f"{prefix}.{expert}.{name}.weight"] = MadeTensor(shape, FEW_BITS, read)
    return dense


def _read(blocks: StoredTensor, scales: StoredTensor, expert: int, outputs: slice) -> QuantizedWeight:
    octets, exponents = blocks.tensor()[expert, outputs], scales.tensor()[expert, outputs]
    codes = torch.stack([octets & 15, octets >> 4], -1).flatten(1)
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - HALVED)
    return QuantizedWeight(codes.view(torch.int8), narrow(scale), None, 4, floating=True)
