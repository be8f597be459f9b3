"""What a block-diffusion model thinks of a noisy text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdraft.diffusion.mask import flex_mask, training_mask
from blockdraft.diffusion.model import DiffusionModel, hide_mask_token
from blockdraft.diffusion.noise import Noise
from blockdraft.nn.attention import Visible
from blockdraft.nn.denoiser import Denoiser

CHUNK = 2048  # masked tokens whose logits exist at once


def shifted(states_BLH: Tensor, before_BKH: Tensor, block_size: int) -> Tensor:
    """States by the token that they are about, from those by the token that they were said at, where each is about the
    next one.

    Args:
        states_BLH: Of whole blocks, of which the last may be shorter.
        before_BKH: Of the clean tokens right before each of the K blocks.
    """
    moved = torch.cat([before_BKH[:, :1], states_BLH[:, :-1]], dim=1)
    moved[:, ::block_size] = before_BKH
    return moved


def states_about(model: DiffusionModel, noisy_BL: Tensor, clean_BL: Tensor) -> Tensor:
    """What the network thinks of each token `[B, L, H]`, given its noisy block and the clean blocks before it. With a
    token shift there is nothing to be had about the first token of a row, and what stands there means nothing."""
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
    """-log p of each masked token given its noisy block and the clean blocks before it, times its weight, `[B, L]`
    float32; 0 for tokens that are not masked, of which the model is told (SUBS, arXiv 2406.07524)."""
    mask = model.config.mask_token_id
    masked, weights = (each.to(clean_BL.device) for each in noise)
    states_MH = states_about(model, clean_BL.masked_fill(masked, mask), clean_BL)[masked]
    found = []
    for states, tokens in zip(states_MH.split(CHUNK), clean_BL[masked].split(CHUNK), strict=True):
        if torch.is_grad_enabled():  # logits are computed again in the backward pass, rather than kept
            found.append(checkpoint(_nlls, model.network, mask, states, tokens, use_reentrant=False))
        else:
            found.append(_nlls(model.network, mask, states, tokens))
    nlls = torch.cat(found) if found else states_MH.sum(dim=-1).float()
    return torch.zeros_like(weights).masked_scatter(masked, nlls * weights[masked])


def _nlls(network: Denoiser, mask_token_id: int, states_MH: Tensor, tokens_M: Tensor) -> Tensor:
    logits = hide_mask_token(network.logits(states_MH), mask_token_id)
    return F.cross_entropy(logits, tokens_M, reduction="none")
