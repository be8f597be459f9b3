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

    def layer(self, layer: int, *nodes: Tensor) -> tuple[Tensor, ...]:
        if layer not in self._layers:
            with computing():
                self._layers[layer] = tuple(
                    MLXTensor(mx.zeros((node.size(1), self._slots, node.size(3)), dtype=node.array.dtype))
                    for node in nodes
                    if isinstance(node, MLXTensor)
                )
        return self._layers[layer]

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        with computing():
            super().commit(path)

    def extend(self, layer: int, *nodes: Tensor) -> None:
        arrays = [in_mlx(new) for new in nodes]
        count, stores = arrays[0].shape[2], [in_mlx(store) for store in self.layer(layer, *map(MLXTensor, arrays))]
        self.check_room(count)
        with computing():
            for store, new in zip(stores, arrays, strict=True):
                if len(self.starts) == 1:
                    first = self.starts[0] + self.lengths[0]
                    store[:, first : first + count] = new[0]
                else:
                    firsts = torch.tensor(self.starts) + torch.tensor(self.lengths)
                    at = mx.array((firsts[:, None] + torch.arange(count)).numpy())
                    store[:, at] = new.swapaxes(0, 1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.extend(layer, keys, values)
        of_keys, of_values = self.read(layer, keys.size(2))
        return MLXTensor(of_keys), MLXTensor(of_values)

    def read(self, layer: int, count: int = 0, first: int = 0) -> list[Array]:
        """Return keys and values of all sequences, `[B, heads, T, D]` each, from their KV slot `first` on.

        T spans the longest sequence and its `count` nodes. Beyond their own nodes, shorter sequences repeat their first
        KV slot, which masks must hide.
        """
        end, stores = max(self.lengths) + count, self._layers[layer]
        if len(self.starts) == 1:
            start = self.starts[0]
            return [store.array[None, :, start + first : start + end] for store in stores]  # type: ignore[attr-defined]
        slots = torch.arange(first, end).repeat(len(self.starts), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        at = mx.array((torch.where(slots < own, slots, 0) + torch.tensor(self.starts)[:, None]).numpy())
        return [store.array[:, at].swapaxes(0, 1) for store in stores]  # type: ignore[attr-defined]

    def view(self, memory: Tensor, count: int, end: int | None = None) -> tuple[Tensor, bool]:
        raise NotImplementedError("MLX arrays are read with `read`.")
