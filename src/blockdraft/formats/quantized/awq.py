"""AWQ's layout: `[in, out]`, with eight neighbouring outputs per word, in the order `ORDER`.

`qweight` is int32 `[in, out / 8]`, `qzeros` int32 `[in / group, out / 8]`, `scales` `[in / group, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockdraft.formats.quantized.base import check, check_groups, few_bits, modules, part_of, unpacked
from blockdraft.formats.stored import FEW_BITS, FLOATS, MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in a word, from the lowest bits upward


def weights(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    bits, version = raw.get("bits", raw.get("w_bit")), str(raw.get("version") or "gemm").lower()
    check(bits == BITS, f"its AWQ weights have {bits} bits; 4 are read")
    check(version == "gemm", f"its AWQ weights lie as {version}; gemm is read")
    dense = dict[str, StoredTensor]()
    for module in modules(tensors, "qweight"):
        inputs, words = (*tensors[f"{module}.qweight"].shape, 0, 0)[:2]
        groups = (*tensors[f"{module}.scales"].shape, 0)[0] if f"{module}.scales" in tensors else 0
        outputs = words * 8
        parts = (
            part_of(tensors, f"{module}.qweight", ["I32"], (inputs, words)),
            part_of(tensors, f"{module}.scales", sorted(FLOATS), (groups, outputs)),
            part_of(tensors, f"{module}.qzeros", ["I32"], (groups, words)),
        )
        check_groups(module, inputs, groups)
        dense[f"{module}.weight"] = MadeTensor((outputs, inputs), FEW_BITS, partial(_read, *parts))
    return dense


def _read(weight: StoredTensor, scale: StoredTensor, zeros: StoredTensor) -> QuantizedWeight:
    return few_bits(_values(weight.tensor()), _values(zeros.tensor()), scale.tensor().T, BITS)


def _values(words: Tensor) -> Tensor:
    """Unpack words `[n, out / 8]` to values `[out, n]`."""
    places = torch.tensor(ORDER).argsort()
    eights: Tensor = unpacked(words, BITS).unflatten(1, (-1, 8))
    return eights[..., places].flatten(1).T.contiguous()
