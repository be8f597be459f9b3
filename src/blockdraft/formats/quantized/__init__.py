"""How checkpoints of Hugging Face keep weights of few bits: one file a layout, named after its `quant_method`.

Each holds `weights`; `base.py` says what that gives. Embedding, head and norms may stay as they are in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.formats.quantized.base import NotRead, check
from blockdraft.formats.stored import FEW_BITS, FLOATS, Stored
from blockdraft.plugins import plugins


def read_quantized(raw: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a quantised checkpoint under the names that they would have in 16 bits.

    Args:
        raw: The `quantization_config` of config.json.
        tensors: Of the checkpoint, by their own names.

    Raises:
        NotRead: The layout is none of ours, or has or lacks something that we do not or must know.
    """
    known, method = plugins(__name__), str(raw.get("quant_method"))
    check(
        method.replace("-", "_") in known,
        f"it is quantised by {method}, which is none of {', '.join(name.replace('_', '-') for name in known)}",
    )
    found: dict[str, Stored] = {**tensors, **known[method.replace("-", "_")].weights(raw, tensors)}
    for name, tensor in found.items():
        fits = not name.endswith(".weight") or tensor.kind in {*FLOATS, FEW_BITS}
        check(fits, f"{name} is of {tensor.kind}, and its scales are missing")
    return found


__all__ = ["NotRead", "read_quantized"]
