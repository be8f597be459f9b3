"""Medusa's heads (arXiv 2401.10774): each predicts the token at its own distance from the target's last hidden state.

They read the input of the target's head, after the last norm, at the token before the anchor. From it the target's head
predicts the anchor, and head k, counted from 0, the token k + 1 positions behind the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.draft_config import whole
from blockdraft.nn.draft_network import DraftDescription, DraftNetwork


@dataclass(frozen=True)
class MedusaConfig:
    """Configuration of Medusa's heads. Raises ValueError for a value out of range.

    Attributes:
        num_heads: Number of heads, each of which drafts one token.
        num_layers: Residual blocks per head.
        shared_head: Whether all heads end in the target's output projection, instead of their own.
    """

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    num_heads: int
    num_layers: int = 1
    shared_head: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_target_layers", "num_heads", "num_layers"):
            whole(name, getattr(self, name))

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)` on `[..., H]`. A new block has W = 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaNetwork(nn.ModuleList, DraftNetwork):
    """Heads, each a sequence of residual blocks and, unless it is the target's, an output projection.

    Parameter names equal the tensor names of FasterDecoding's checkpoints, so `state_dict` is the checkpoint.
    """

    def __init__(self, config: MedusaConfig) -> None:
        size, vocabulary = config.hidden_size, config.vocab_size
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(size) for _ in range(config.num_layers)),
                *(() if config.shared_head else (nn.Linear(size, vocabulary, bias=False),)),
            )
            for _ in range(config.num_heads)
        )
        self.config = config
        self.description = DraftDescription(heads=config.num_heads, head_blocks=config.num_layers)

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return states `[..., count, H]` of the first `count` heads, or of all.

        They are computed from the target's hidden states `[..., H]`.
        """
        heads = self._heads(self.config.num_heads if count is None else count)
        return torch.stack([head[: self.config.num_layers](hidden) for head in heads], dim=-2)

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits `[..., K, V]` of the states `[..., K, H]` of the first K heads.

        `target_head` is used if the heads share it.
        """
        if self.config.shared_head:
            return target_head(states)
        heads = self._heads(states.size(-2))
        return torch.stack([head[-1](state) for head, state in zip(heads, states.unbind(-2), strict=True)], dim=-2)

    def projections(self) -> Iterator[nn.Linear]:
        """Return the output projections of the heads; none if they share the target's."""
        return (cast(nn.Linear, head[-1]) for head in self._heads(0 if self.config.shared_head else len(self)))

    def _heads(self, count: int) -> list[nn.Sequential]:
        return [cast(nn.Sequential, head) for head in list(self)[:count]]
