"""Who sees whom where a noisy text stands before its clean self."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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


def training_rule(length: int, block_size: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`training_mask` as FlexAttention wants it: a function of row, head, and the places that see and are seen."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = query % length // block_size, key % length // block_size
        is_noisy, other_is_noisy = query < length, key < length
        to_clean = ~other_is_noisy & ((other < own) | (~is_noisy & (other == own)))
        return to_clean | (is_noisy & other_is_noisy & (other == own))

    return sees


@lru_cache(maxsize=4)  # to make one takes longer than to attend with it
def flex_mask(length: int, block_size: int, device: torch.device) -> BlockMask:
    """`training_mask` for FlexAttention, which computes no tiles that nobody sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    rule = training_rule(length, block_size)
    return create_block_mask(rule, None, None, 2 * length, 2 * length, device=str(device))
