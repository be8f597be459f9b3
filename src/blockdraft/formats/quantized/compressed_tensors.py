"""Layout of the compressed-tensors project, `[out, in]`.

`pack-quantized` has `weight_packed`, int32 `[out, in * bits / 32]` of unsigned values; `weight_scale`, `[out, in /
group]`; `weight_shape`; and, if zeros are not in the middle of the range, `weight_zero_point`, int32 `[out * bits / 32,
in / group]`. `int-quantized` has `weight` in int8, and scales and zeros unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.formats.quantized.base import (
    NotRead,
    check,
    check_groups,
    check_order,
    few_bits,
    part_of,
    unpacked,
)
from blockdraft.formats.stored import FEW_BITS, FLOATS, MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight

PACKED, WHOLE = "pack-quantized", "int-quantized"
STRATEGIES = ("group", "channel", "tensor")


def weights(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    _check_config(raw)
    dense = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            dense[f"{module}.weight"] = _packed(module, tensors)
        elif part == "weight" and tensor.kind == "I8":
            dense[name] = _whole(module, tensors)
    check(bool(dense), "its configuration says that it is quantized, and no module is")
    return dense


def _check_config(raw: Mapping[str, Any]) -> None:
    """Raise `NotRead` for a configuration that needs more than quantized weights."""
    groups, sparsity = raw.get("config_groups") or {}, raw.get("sparsity_config") or {}
    check(bool(groups), "its quantization_config has no config_groups")
    if not isinstance(groups, Mapping) or not isinstance(sparsity, Mapping):
        raise NotRead("config_groups or sparsity_config of its quantization_config is no object")
    check(not raw.get("kv_cache_scheme"), "its keys and values are quantized, too (kv_cache_scheme)")
    check(not raw.get("transform_config"), "its weights are rotated (transform_config)")
    sparse = sparsity.get("format") or "dense"
    check(sparse == "dense", f"its weights are sparse ({sparse})")
    for name, group in groups.items():
        layout = (group.get("format") if isinstance(group, Mapping) else None) or raw.get("format")
        check(layout in (PACKED, WHOLE), f"its weights lie as {layout} ({name}); {PACKED} and {WHOLE} are read")
        if not isinstance(group, Mapping) or not isinstance(rounded := group.get("weights"), Mapping):
            raise NotRead(f"{name} of its config_groups does not say how weights are quantized")
        kind = f"{rounded.get('type', 'int')}{rounded.get('num_bits')}"
        check(kind in ("int4", "int8"), f"its weights are of {kind} ({name}); int4 and int8 are read")
        strategy = rounded.get("strategy") or "group"
        check(strategy in STRATEGIES, f"its scales are by {strategy} ({name}); {', '.join(STRATEGIES)} are read")
        check(not group.get("output_activations"), f"its outputs are quantized, too ({name})")
        inputs = group.get("input_activations")
        # Our matrix products quantize inputs to int8 anyway, in groups at least as fine.
        free = not inputs or (
            inputs.get("dynamic") is True and (inputs.get("type"), inputs.get("num_bits")) == ("int", 8)
        )
        check(free, f"its inputs are quantized with static scales ({name}); only dynamic int8 is supported")


def _packed(module: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    shape = part_of(tensors, f"{module}.weight_shape", ["I64", "I32"], (2,)).tensor().tolist()
    outputs, inputs = int(shape[0]), int(shape[1])
    words = (*tensors[f"{module}.weight_packed"].shape, 0, 0)[1]
    bits = words * 32 // inputs if inputs else 0
    check(
        bits in (4, 8), f"{module}.weight_packed has {words} words for rows of {inputs}, which is neither 4 nor 8 bits"
    )
    weight = part_of(tensors, f"{module}.weight_packed", ["I32"], (outputs, inputs * bits // 32))
    scale, groups = _scale(module, tensors, outputs, inputs)
    zeros = None
    if f"{module}.weight_zero_point" in tensors:
        rows = -(-outputs * bits // 32)
        zeros = part_of(tensors, f"{module}.weight_zero_point", ["I32"], (rows, groups))

    def read() -> QuantizedWeight:
        zero = None if zeros is None else unpacked(zeros.tensor().T, bits)[:, :outputs].T
        return few_bits(unpacked(weight.tensor(), bits), zero, _spread(scale, outputs), bits)

    return MadeTensor((outputs, inputs), FEW_BITS, read)


def _whole(module: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    outputs, inputs = (*tensors[f"{module}.weight"].shape, 0, 0)[:2]
    weight = part_of(tensors, f"{module}.weight", ["I8"], (outputs, inputs))
    scale, groups = _scale(module, tensors, outputs, inputs)
    fixed = f"{module}.input_scale" in tensors
    check(not fixed, f"its inputs are quantized with static scales ({module}.input_scale)")
    zeros = None
    if f"{module}.weight_zero_point" in tensors:
        zeros = part_of(tensors, f"{module}.weight_zero_point", ["I8"], scale.shape)

    def read() -> QuantizedWeight:
        zero = None if zeros is None else _spread(zeros, outputs).int() + 128
        return few_bits(weight.tensor().view(torch.uint8) ^ 128, zero, _spread(scale, outputs), 8)

    return MadeTensor((outputs, inputs), FEW_BITS, read)


def _scale(module: str, tensors: Mapping[str, StoredTensor], outputs: int, inputs: int) -> tuple[StoredTensor, int]:
    """Return the scales and the number of groups of inputs."""
    name = f"{module}.weight_scale"
    shape = tensors[name].shape if name in tensors else ()
    groups = shape[1] if len(shape) == 2 else 1
    scale = part_of(tensors, name, sorted(FLOATS), shape if shape in ((), (1,)) else (outputs, groups))
    check_groups(module, inputs, groups)
    check_order(f"{module}.weight_g_idx", tensors, inputs, groups)
    return scale, groups


def _spread(factors: StoredTensor, outputs: int) -> Tensor:
    """Expand factors to `[out, groups]`, if all outputs share one."""
    values = factors.tensor()
    return values if values.ndim == 2 else values.reshape(1, 1).expand(outputs, 1)
