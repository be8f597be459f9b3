"""Networks that guess a token at a time, in rows.

The row of a token x[s] is made of the token's embedding and of a feature of the position before it: what `fuse` makes
of the target's tapped outputs at s - 1 or, where the target has not been there yet, what the network feeds on from the
row before. It stands at position s - 1 and guesses x[s + 1]. The first token of a text has no row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from blockdraft.nn.attention import attend

# (queries [B, heads, N, D], keys and values of the same rows [B, kv_heads, N, D]) -> [B, heads, N, D]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CachedAttention:
    """An `Attend` in its parts, for layers that attend by themselves.

    Attributes:
        write: Puts keys and values of the rows behind those of the rows before, and returns all of them.
        visible: `[B, N, T]` bool, which of all T rows each of these sees.
    """

    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    visible: Tensor

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, *self.write(keys, values), self.visible)


class RowNetwork(ABC, nn.Module):
    """Attributes:
    config: With `taps`, `block_size` and `hidden_size` at least.
    fc: Of the network's device and dtype, like all of its weights.
    """

    config: Any
    fc: nn.Linear

    @property
    @abstractmethod
    def kept(self) -> Tensor:
        """The target's ids of the tokens that it can guess, `[Vd]` int64."""

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads, and the size of each, of the keys and of the values that `keys_values` gives."""
        heads: tuple[int, int] = self.config.num_key_value_heads, self.config.head_dim
        return heads, heads

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Features `[..., H]` of the tapped layers' outputs, `[..., m * H]`."""

    @abstractmethod
    def keys_values(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What later rows see of these; arguments as in `forward`. Keys and values, each `[B, heads, N, D]`."""

    @abstractmethod
    def forward(self, embedded: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The network's own states of some rows.

        Args:
            embedded: `[B, N, H]`, of the rows' tokens.
            feature: `[B, N, H]`, of the positions before.
            positions: `[B, N]`, where the features come from.
            attend: Attention of these rows to those that they see, themselves included.

        Returns:
            `[B, N, H]`, before the last norm: what `logits` takes, and `fed_on`.
        """

    @abstractmethod
    def fed_on(self, hidden: Tensor) -> Tensor:
        """The feature that the next row gets of states `[..., H]`."""

    @abstractmethod
    def logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Over the tokens that it can guess, `[..., Vd]`, of states `[..., H]`.

        Args:
            target_head: The target's output projection, for networks that have none of their own.
        """
