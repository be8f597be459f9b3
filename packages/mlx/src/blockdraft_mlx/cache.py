"""Key/value cache in MLX arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft_mlx.tensor import Array, MLXTensor, computing, in_mlx, mx


class MLXCache(KVCache):
    """A `KVCache` whose layers are MLX arrays `[heads, KV slots, D]`, written lazily.

    Committing a chain changes lengths only; the nodes of any other path are gathered. One sequence is read in place,
    and several are copied side by side.
    """

    def allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        with computing():
            return MLXTensor(mx.zeros(shape, dtype=in_mlx(like).dtype))

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        with computing():
            super().keep(path)

    def extend(self, store: Tensor, nodes: Tensor) -> None:
        own, new = in_mlx(store), in_mlx(nodes)
        count = new.shape[2]
        self.check_room(count)
        with computing():
            if len(self.starts) == 1:
                first = self.starts[0] + self.lengths[0]
                own[:, first : first + count] = new[0]
            else:
                firsts = torch.tensor(self.starts) + torch.tensor(self.lengths)
                at = mx.array((firsts[:, None] + torch.arange(count)).numpy())
                own[:, at] = new.swapaxes(0, 1)

    def view(self, memory: Tensor, count: int = 0, end: int | None = None) -> tuple[Tensor, bool]:
        return MLXTensor(self.read(memory, count)), False

    def read(self, store: Tensor, count: int = 0, first: int = 0) -> Array:
        """Return a store of all sequences, `[B, heads, T, D]`, from their KV slot `first` on.

        T spans the longest sequence and its `count` nodes. Beyond their own nodes, shorter sequences repeat their first
        KV slot, which masks must hide.
        """
        end, array = max(self.lengths) + count, in_mlx(store)
        if len(self.starts) == 1:
            start = self.starts[0]
            return array[None, :, start + first : start + end]
        slots = torch.arange(first, end).repeat(len(self.starts), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        at = mx.array((torch.where(slots < own, slots, 0) + torch.tensor(self.starts)[:, None]).numpy())
        return array[:, at].swapaxes(0, 1)
