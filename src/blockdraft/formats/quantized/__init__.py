"""Quantized checkpoints of Hugging Face: one file per layout, named after its `quant_method`.

Each file defines `weights`, which `base.py` describes. In all layouts embedding, head and norms may be unquantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.formats.quantized.base import NotRead, check
from blockdraft.formats.stored import FEW_BITS, FLOATS, StoredTensor
from blockdraft.plugins import plugins


def read_quantized(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a quantized checkpoint under their names in an unquantized one.

    Args:
        raw: `quantization_config` of config.json.
        tensors: Tensors of the checkpoint under their names in the files.

    Raises:
        NotRead: The layout is unknown, unsupported or incomplete.
    """
    known, method = plugins(__name__), str(raw.get("quant_method"))
    check(
        method.replace("-", "_") in known,
        f"it is quantized by {method}, which is none of {', '.join(name.replace('_', '-') for name in known)}",
    )
    for name, tensor in tensors.items():
        together = len(tensor.shape) == 3 and tensor.kind in ("I32", "I8")
        check(
            not together, f"{name} holds all experts of a layer; only experts one by one (experts.0.gate_proj) are read"
        )
    weights: dict[str, StoredTensor] = {**tensors, **known[method.replace("-", "_")].weights(raw, tensors)}
    for name, tensor in weights.items():
        fits = not name.endswith(".weight") or tensor.kind in {*FLOATS, FEW_BITS}
        check(fits, f"{name} is of {tensor.kind}, and its scales are missing")
    return weights


__all__ = ["NotRead", "read_quantized"]
