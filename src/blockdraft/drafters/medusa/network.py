"""Medusa's heads (arXiv 2401.10774): each guesses the token at its own distance from the target's last hidden state.

What they read is the input of the target's own head, after the last norm, at the token before the anchor. The target's
head makes the anchor of it, and head k, counted from 0, the token k + 1 behind the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.draft_config import whole
from blockdraft.timing import HEAD, PASS, mark


@dataclass(frozen=True)
class MedusaConfig:
    """Raises ValueError for what is out of range.

    Attributes:
        num_heads: Guesses behind the anchor.
        num_layers: Residual blocks of each head.
        shared_head: Whether the target's output projection ends every head, instead of one of its own.
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
    def taps(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (self.num_target_layers,)


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`; a new one has W = 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaNetwork(nn.ModuleList):
    """The heads, each a line of residual blocks and, unless it is the target's, the output projection.

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

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """What the first `count` heads, or all, make of hidden states `[..., H]` of the target: `[..., count, H]`."""
        heads = self._heads(self.config.num_heads if count is None else count)
        return torch.stack([head[: self.config.num_layers](hidden) for head in heads], dim=-2)

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits `[..., K, V]` of the states `[..., K, H]` of the first K heads; `target_head` is used if shared."""
        if self.config.shared_head:
            return target_head(states)
        heads = self._heads(states.size(-2))
        return torch.stack([head[-1](state) for head, state in zip(heads, states.unbind(-2), strict=True)], dim=-2)

    def projections(self) -> Iterator[nn.Linear]:
        """The output projections of its own; none where they are the target's."""
        return (cast(nn.Linear, head[-1]) for head in self._heads(0 if self.config.shared_head else len(self)))

    def runner(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> HeadRunner:
        """As `Runnable.runner` of targets: a `HeadPass`."""
        return HeadPass(self, head, compile_reason)

    def _heads(self, count: int) -> list[nn.Sequential]:
        return [cast(nn.Sequential, head) for head in list(self)[:count]]


class HeadRunner(Protocol):
    """Runs Medusa's heads, in the target's way of computing.

    Attributes:
        compile_reason: Why they are not compiled, where they might have been; else None.
    """

    compile_reason: str | None

    def weight_bytes(self) -> int:
        """Memory of weights that it keeps beside the network's own."""

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        """Logits `[B, count, V]` of the first heads, of the target's hidden states `[B, H]`."""


class HeadPass:
    """A `HeadRunner` of torch's operations.

    Args:
        head: The target's.
        compile_reason: Why they are not compiled, where they might have been.
    """

    def __init__(
        self, network: MedusaNetwork, head: Callable[[Tensor], Tensor], compile_reason: str | None = None
    ) -> None:
        self._network, self._head, self.compile_reason = network, head, compile_reason

    def weight_bytes(self) -> int:
        return 0

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        states = self._network(hidden, count)
        mark(PASS)
        logits = self._network.logits(states, self._head)
        mark(HEAD)
        return logits
