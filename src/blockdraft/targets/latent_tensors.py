"""Tensors of checkpoints with latent attention, by the names of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from blockdraft.formats.stored import FEW_BITS, MadeTensor, StoredTensor
from blockdraft.nn.decoder_config import LatentAttention
from blockdraft.targets.model_config import AnyConfig

# Parts of DeepSeek's names, and ours.
NAMES = ((".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"), (".mlp.shared_experts.", ".mlp.shared_expert."))
EXPANSION = ".kv_b_proj.weight"  # of vectors to keys and values of all heads
ABSORBED = ".k_b_proj.weight"  # its part for keys, transposed for each head


def latent_config(config: AnyConfig) -> LatentAttention:
    return LatentAttention(
        rank=config.kv_lora_rank,
        rotated=config.qk_rope_head_dim,
        unrotated=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        query_rank=config.q_lora_rank or 0,
    )


def rows_in_halves(latent: LatentAttention, heads: int) -> dict[str, Tensor]:
    """Return which row of a checkpoint each of our rows is, `[rows]` int64, by the last part of a projection's name.

    Checkpoints rotate neighbouring channels together, and we those that are half of the rotated ones apart.
    """
    turned = torch.arange(latent.rotated).view(-1, 2).T.flatten()

    def behind(before: int, count: int) -> Tensor:
        own = torch.cat([torch.arange(before), before + turned])
        return (torch.arange(count)[:, None] * (before + latent.rotated) + own).flatten()

    queries = behind(latent.unrotated, heads)
    return {"q_proj": queries, "q_b_proj": queries, "kv_a_proj_with_mqa": behind(latent.rank, 1)}


def latent_tensors(tensors: Mapping[str, StoredTensor], config: AnyConfig) -> dict[str, StoredTensor]:
    """Return tensors under our names. Tensors with our names stay as they are."""
    latent, heads, own = latent_config(config), config.num_attention_heads, dict[str, StoredTensor]()
    is_ours = any(name.endswith(ABSORBED) for name in tensors)
    orders = rows_in_halves(latent, heads) if getattr(config, "rope_interleave", True) and not is_ours else {}
    size = latent.unrotated + latent.value_dim
    rows = torch.arange(heads * size).view(heads, size)
    for name, tensor in tensors.items():
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        place, expands, _ = name.partition(EXPANSION)
        order = orders.get(name.removesuffix(".weight").rpartition(".")[2])
        if expands and tensor.shape[0] == heads * size:
            keys = tensor.rows(rows[:, : latent.unrotated].flatten())
            shape = (heads * tensor.shape[1], latent.unrotated)
            read = partial(_read_absorbed, keys, latent.unrotated)
            kind = "F32" if tensor.kind == FEW_BITS else tensor.kind  # its inputs are no longer in groups
            own[place + ABSORBED] = MadeTensor(shape, kind, read)
            own[f"{place}.v_b_proj.weight"] = tensor.rows(rows[:, latent.unrotated :].flatten())
        elif order is not None and tensor.shape[0] == len(order):
            own[name] = tensor.rows(order)
        else:
            own[name] = tensor
    return own


def _read_absorbed(keys: StoredTensor, size: int) -> Tensor:
    """Read the projection of vectors to keys, `[heads * size, rank]`, as `[heads * rank, size]`."""
    absorbed: Tensor = keys.tensor().unflatten(0, (-1, size)).mT.flatten(0, 1)
    return absorbed
