"""GPTQ's layout: `[in, out]`, with neighbouring inputs in a word.

`qweight` is int32 `[in * bits / 32, out]`; `qzeros` int32 `[in / group, out * bits / 32]`, where the older layout
stores each zero minus one; `scales` `[in / group, out]`; `g_idx` `[in]`, the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from blockdraft.formats.quantized.base import (
    NotRead,
    check,
    check_groups,
    check_order,
    few_bits,
    modules,
    part_of,
    unpacked,
)
from blockdraft.formats.stored import FEW_BITS, FLOATS, MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight

LESS_ONE = {"gptq": 1, "gptq_v2": 0}  # subtracted from stored zeros, by `checkpoint_format`


def weights(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    bits, layout = raw.get("bits"), str(raw.get("checkpoint_format") or "gptq")
    if not isinstance(bits, int) or bits not in (4, 8):
        raise NotRead(f"its GPTQ weights have {bits} bits; 4 and 8 are read")
    check(layout in LESS_ONE, f"its GPTQ weights lie as {layout}; {' and '.join(LESS_ONE)} are read")
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise NotRead("dynamic of its quantization_config is no object")
    others = [name for name, own in dynamic.items() if own and not name.startswith("-:")]  # these are left unquantized
    check(not others, f"GPTQ's dynamic settings differ for {', '.join(others)}; one setting for all is read")
    dense = dict[str, StoredTensor]()
    for module in modules(tensors, "qweight"):
        words, outputs = (*tensors[f"{module}.qweight"].shape, 0, 0)[:2]
        groups = (*tensors[f"{module}.scales"].shape, 0)[0] if f"{module}.scales" in tensors else 0
        inputs = words * 32 // bits
        parts = (
            part_of(tensors, f"{module}.qweight", ["I32"], (words, outputs)),
            part_of(tensors, f"{module}.scales", sorted(FLOATS), (groups, outputs)),
            part_of(tensors, f"{module}.qzeros", ["I32"], (groups, outputs * bits // 32)),
        )
        check_groups(module, inputs, groups)
        check_order(f"{module}.g_idx", tensors, inputs, groups)
        read = partial(_read, module, *parts, bits, LESS_ONE[layout])
        dense[f"{module}.weight"] = MadeTensor((outputs, inputs), FEW_BITS, read)
    return dense


def _read(
    module: str, weight: StoredTensor, scale: StoredTensor, zeros: StoredTensor, bits: int, less: int
) -> QuantizedWeight:
    zero = unpacked(zeros.tensor(), bits).int() + less
    check(
        int(zero.max()) < 1 << bits,
        f"{module}.qzeros holds zero points that wrapped around when one was subtracted, which programs read "
        "differently; save it as gptq_v2",
    )
    return few_bits(unpacked(weight.tensor().T, bits), zero.T, scale.tensor().T, bits)
