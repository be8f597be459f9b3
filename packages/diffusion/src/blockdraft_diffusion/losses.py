"""Attention mask of training, and the losses of a block-diffusion model on noisy text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdraft.nn.attention import Visible
from blockdraft_diffusion.denoiser import Denoiser
from blockdraft_diffusion.model import DiffusionModel, hide_mask_token
from blockdraft_diffusion.noise import Noise

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CHUNK = 2048  # masked tokens whose logits are in memory at once


def block_causal(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Return the attention mask of a clean text: a token attends to its own block and the blocks before it.

    Returns:
        `[length, length]` bool.
    """
    blocks = torch.arange(length, device=device) // block_size
    return blocks[:, None] >= blocks[None, :]


def training_mask(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Return the attention mask of `[x_t ; x_0]`, a noisy text followed by the same clean text (arXiv 2503.09573).

    A noisy token attends to its own noisy block and the clean blocks before it, as during sampling. A clean token
    attends to its own clean block and the clean blocks before it, and to nothing noisy. Token i of both halves has
    position i. The last block may be shorter.

    Returns:
        `[2 * length, 2 * length]` bool.
    """
    clean = block_causal(length, block_size, device)
    same_block = clean & clean.T
    noisy_rows = torch.cat([same_block, clean & ~same_block], dim=1)
    return torch.cat([noisy_rows, torch.cat([torch.zeros_like(clean), clean], dim=1)])


def training_rule(length: int, block_size: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return `training_mask` as a function of batch, head, query and key indices, for FlexAttention."""

    def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_block, key_block = query % length // block_size, key % length // block_size
        is_noisy, key_is_noisy = query < length, key < length
        to_clean = ~key_is_noisy & ((key_block < query_block) | (~is_noisy & (key_block == query_block)))
        return to_clean | (is_noisy & key_is_noisy & (key_block == query_block))

    return may_attend


@lru_cache(maxsize=4)  # building a mask takes longer than the attention
def flex_mask(length: int, block_size: int, device: torch.device) -> BlockMask:
    """Return `training_mask` for FlexAttention, which skips fully masked tiles."""
    from torch.nn.attention.flex_attention import create_block_mask

    rule = training_rule(length, block_size)
    return create_block_mask(rule, None, None, 2 * length, 2 * length, device=str(device))


def shifted(states_BLH: Tensor, before_BKH: Tensor, block_size: int) -> Tensor:
    """Move hidden states to the positions that they predict, for a model with a token shift.

    Args:
        states_BLH: States of whole blocks; the last block may be shorter. Each predicts the next position.
        before_BKH: States of the clean token right before each of the K blocks.

    Returns:
        `[B, L, H]`.
    """
    moved = torch.cat([before_BKH[:, :1], states_BLH[:, :-1]], dim=1)
    moved[:, ::block_size] = before_BKH
    return moved


def predicting_states(model: DiffusionModel, noisy_BL: Tensor, clean_BL: Tensor) -> Tensor:
    """Return the hidden states that predict each token, given its noisy block and the clean blocks before it.

    With a token shift nothing predicts the first token of a sequence, and its state is meaningless.

    Args:
        noisy_BL, clean_BL: Token ids, int64.

    Returns:
        `[B, L, H]`.
    """
    length, size = clean_BL.size(1), model.config.block_size
    positions = torch.arange(length, device=clean_BL.device).repeat(2)[None]
    visible: Visible
    if clean_BL.is_cuda:
        visible = flex_mask(length, size, clean_BL.device)
    else:
        visible = training_mask(length, size, clean_BL.device)[None]
    states = model.network.hidden(torch.cat([noisy_BL, clean_BL], dim=1), positions, visible)
    noisy, clean = states[:, :length], states[:, length:]
    if not model.config.token_shift:
        return noisy
    before = torch.cat([clean[:, :1], clean[:, size - 1 : -1 : size]], dim=1)
    return shifted(noisy, before, size)


def losses(model: DiffusionModel, clean_BL: Tensor, noise: Noise) -> Tensor:
    """Compute the weighted losses: the weight of each masked token times its -log p.

    Each token is predicted from its noisy block and the clean blocks before it. Unmasked tokens have loss 0 (SUBS,
    arXiv 2406.07524).

    Returns:
        `[B, L]` float32.
    """
    mask = model.config.mask_token_id
    masked, weights = (values.to(clean_BL.device) for values in noise)
    states_MH = predicting_states(model, clean_BL.masked_fill(masked, mask), clean_BL)[masked]
    chunks = []
    for states, tokens in zip(states_MH.split(CHUNK), clean_BL[masked].split(CHUNK), strict=True):
        if torch.is_grad_enabled():  # recompute the logits in the backward pass, to save memory
            chunks.append(checkpoint(_nlls, model.network, mask, states, tokens, use_reentrant=False))
        else:
            chunks.append(_nlls(model.network, mask, states, tokens))
    nlls = torch.cat(chunks) if chunks else states_MH.sum(dim=-1).float()
    return torch.zeros_like(weights).masked_scatter(masked, nlls * weights[masked])


def _nlls(network: Denoiser, mask_token_id: int, states_MH: Tensor, tokens_M: Tensor) -> Tensor:
    logits = hide_mask_token(network.logits(states_MH), mask_token_id)
    return F.cross_entropy(logits, tokens_M, reduction="none")
