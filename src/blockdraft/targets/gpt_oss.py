"""Tensors of gpt-oss checkpoints, by the names of the native decoder.

Checkpoints hold the experts of a layer together, `[experts, in, out]`, or in MXFP4 `[experts, out, groups, 16]`. Gates
and the values that they are multiplied with alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from blockdraft.formats.stored import MadeTensor, StoredTensor
from blockdraft.targets.model_config import AnyConfig

ROUTER, OWN_ROUTER = ".mlp.router.", ".mlp.gate."
EVERY_SECOND = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
OUTPUTS = {"gate_up_proj": EVERY_SECOND, "down_proj": {"down_proj": slice(None)}}


def gpt_oss_tensors(tensors: Mapping[str, StoredTensor], config: AnyConfig) -> dict[str, StoredTensor]:
    """Return tensors under our names, those of experts one by one. Tensors with our names stay as they are."""
    own = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".mlp.experts.")
        projection, is_bias = part.removesuffix("_bias"), part.endswith("_bias")
        if projection not in OUTPUTS or len(tensor.shape) != (2 if is_bias else 3):
            own[name.replace(ROUTER, OWN_ROUTER)] = tensor
            continue
        experts, outputs = tensor.shape[0], tensor.shape[-1]
        for ours, which in OUTPUTS[projection].items():
            count = len(range(*which.indices(outputs)))
            shape = (count,) if is_bias else (count, tensor.shape[1])
            for expert in range(experts):
                key = f"{layer}.mlp.experts.{expert}.{ours}.{'bias' if is_bias else 'weight'}"
                own[key] = MadeTensor(shape, tensor.kind, partial(_read, tensor, expert, which))
    return own


def _read(tensor: StoredTensor, expert: int, outputs: slice) -> Tensor:
    """Read some outputs of one expert; the file is mapped, so that others are not read."""
    own = tensor.tensor()[expert, ..., outputs]
    return (own if own.ndim == 1 else own.T).contiguous()
