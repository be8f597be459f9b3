"""Who sees whom where a noisy text stands before its clean self."""

from __future__ import annotations

import torch
from torch import Tensor


def block_causal(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """`[length, length]` bool: in a clean text, a token sees its own block and those before it."""
    blocks = torch.arange(length, device=device) // block_size
    return blocks[:, None] >= blocks[None, :]


def training_mask(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Who sees whom in `[x_t ; x_0]`, a noisy text and behind it the same text without noise.

    A noisy token sees its own noisy block and the clean blocks before it, which is what it sees when the block is
    sampled. A clean token sees its own clean block and those before it, and nothing noisy. Token i of both halves has
    position i. The last block may be shorter.

    Returns:
        `[2 * length, 2 * length]` bool.
    """
    clean = block_causal(length, block_size, device)
    own = clean & clean.T
    return torch.cat([torch.cat([own, clean & ~own], dim=1), torch.cat([torch.zeros_like(own), clean], dim=1)])
