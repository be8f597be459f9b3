"""Tensors of Qwen3-Next checkpoints, by the names of the native decoder.

Checkpoints hold all projections of a gated delta net in two matrices, the outputs of each key head side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blockdraft.formats.stored import StoredTensor
from blockdraft.targets.model_config import AnyConfig

NET = ".linear_attn."


def qwen3_next_tensors(tensors: Mapping[str, StoredTensor], config: AnyConfig) -> dict[str, StoredTensor]:
    """Return tensors under our names. Tensors with our names stay as they are."""
    heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    # Outputs of a key head in each matrix, and which of them ours have.
    splits: dict[str, tuple[list[int], dict[str, list[int]]]] = {
        "in_proj_qkvz.weight": ([key_dim, key_dim, values, values], {"in_proj_qkv": [0, 1, 2], "in_proj_z": [3]}),
        "in_proj_ba.weight": ([group, group], {"in_proj_b": [0], "in_proj_a": [1]}),
    }
    own = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        layer, net, part = name.partition(NET)
        sizes, names = splits.get(part, ([], {}))
        if not net or not sizes or tensor.shape[0] != heads * sum(sizes):
            own[name] = tensor
            continue
        parts = torch.arange(tensor.shape[0]).view(heads, -1).split(sizes, dim=1)
        for ours, numbers in names.items():
            rows = torch.cat([parts[number].flatten() for number in numbers])
            own[f"{layer}{NET}{ours}.weight"] = tensor.rows(rows)
    return own
