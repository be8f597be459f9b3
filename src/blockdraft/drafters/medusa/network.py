"""Medusa's heads (arXiv 2401.10774): each predicts the token at its own distance from the target's last hidden state.

They read the input of the target's head, after the last norm, at the token before the anchor. From it the target's head
predicts the anchor, and head k, counted from 0, the token k + 1 positions behind the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.draft_config import whole
from blockdraft.nn.draft_network import DraftHost, DraftNetwork, NetworkRunner
from blockdraft.timing import HEAD, PASS, mark


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

    architecture = "medusa"

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

    def runner(self, host: DraftHost) -> HeadRunner:
        return HeadPass(self, host)

    def _heads(self, count: int) -> list[nn.Sequential]:
        return [cast(nn.Sequential, head) for head in list(self)[:count]]


class HeadRunner(NetworkRunner, Protocol):
    """Runs Medusa's heads. The state holds the target's last hidden state at each token.

    Attributes:
        config: Configuration of the heads.
        dtype: Dtype of the target.
    """

    config: MedusaConfig
    dtype: torch.dtype

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * self.config.hidden_size * self.dtype.itemsize

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        """Return logits `[B, count, V]` of the first `count` heads for the target's hidden states `[B, H]`."""


class HeadPass(HeadRunner):
    """A `HeadRunner` that uses torch's operations."""

    def __init__(self, network: MedusaNetwork, host: DraftHost) -> None:
        self._network, self._head, self.compile_reason = network, host.head, host.compile_reason
        self.config, self.dtype = network.config, host.dtype

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        states = self._network(hidden, count)
        mark(PASS)
        logits = self._network.logits(states, self._head)
        mark(HEAD)
        return logits
