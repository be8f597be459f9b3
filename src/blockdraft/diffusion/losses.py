"""Training's attention mask, and a block-diffusion model's losses on noisy text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdraft.diffusion.model import DiffusionModel, hide_mask_token
from blockdraft.diffusion.noise import Noise
from blockdraft.nn.attention import Visible
from blockdraft.nn.denoiser import Denoiser

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CHUNK = 2048  # masked tokens whose logits exist at once


def block_causal(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Attention mask of a clean text, `[length, length]` bool: a token sees its own block and those before it."""
    blocks = torch.arange(length, device=device) // block_size
    return blocks[:, None] >= blocks[None, :]


def training_mask(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Attention mask of `[x_t ; x_0]`, a noisy text followed by the same text without noise (arXiv 2503.09573).

    A noisy token sees its own noisy block and the clean blocks before it, which is what it sees when the block is
    sampled. A clean token sees its own clean block and those before it, and nothing noisy. Token i of both halves has
    position i. The last block may be shorter.

    Returns:
        `[2 * length, 2 * length]` bool.
    """
    clean = block_causal(length, block_size, device)
    own = clean & clean.T
    return torch.cat([torch.cat([own, clean & ~own], dim=1), torch.cat([torch.zeros_like(own), clean], dim=1)])


def training_rule(length: int, block_size: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`training_mask` as a function of row, head, query and key, which FlexAttention takes."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = query % length // block_size, key % length // block_size
        is_noisy, other_is_noisy = query < length, key < length
        to_clean = ~other_is_noisy & ((other < own) | (~is_noisy & (other == own)))
        return to_clean | (is_noisy & other_is_noisy & (other == own))

    return sees


@lru_cache(maxsize=4)  # since making one takes longer than attending with it
def flex_mask(length: int, block_size: int, device: torch.device) -> BlockMask:
    """`training_mask` for FlexAttention, which skips tiles that are wholly masked."""
    from torch.nn.attention.flex_attention import create_block_mask

    rule = training_rule(length, block_size)
    return create_block_mask(rule, None, None, 2 * length, 2 * length, device=str(device))


def shifted(states_BLH: Tensor, before_BKH: Tensor, block_size: int) -> Tensor:
    """Hidden states moved to the positions that they predict, for a model with a token shift, where the state at a
    position predicts the next one.

    Args:
        states_BLH: States of whole blocks, of which the last may be shorter.
        before_BKH: States of the clean token right before each of the K blocks.

    Returns:
        `[B, L, H]`.
    """
    moved = torch.cat([before_BKH[:, :1], states_BLH[:, :-1]], dim=1)
    moved[:, ::block_size] = before_BKH
    return moved


def states_about(model: DiffusionModel, noisy_BL: Tensor, clean_BL: Tensor) -> Tensor:
    """Hidden states that predict each token, `[B, L, H]`, given its noisy block and the clean blocks before it. With a
    token shift nothing predicts the first token of a row, and its state is without meaning.

    Args:
        noisy_BL, clean_BL: Token ids, int64.
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
    """Weighted losses, `[B, L]` float32: for each masked token its weight times -log p, given its noisy block and the
    clean blocks before it; 0 for tokens that are not masked, which the model is given (SUBS, arXiv 2406.07524)."""
    mask = model.config.mask_token_id
    masked, weights = (each.to(clean_BL.device) for each in noise)
    states_MH = states_about(model, clean_BL.masked_fill(masked, mask), clean_BL)[masked]
    found = []
    for states, tokens in zip(states_MH.split(CHUNK), clean_BL[masked].split(CHUNK), strict=True):
        if torch.is_grad_enabled():  # the backward pass computes logits again, which saves their memory
            found.append(checkpoint(_nlls, model.network, mask, states, tokens, use_reentrant=False))
        else:
            found.append(_nlls(model.network, mask, states, tokens))
    nlls = torch.cat(found) if found else states_MH.sum(dim=-1).float()
    return torch.zeros_like(weights).masked_scatter(masked, nlls * weights[masked])


def _nlls(network: Denoiser, mask_token_id: int, states_MH: Tensor, tokens_M: Tensor) -> Tensor:
    logits = hide_mask_token(network.logits(states_MH), mask_token_id)
    return F.cross_entropy(logits, tokens_M, reduction="none")
