"""Key/value memory in MLX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.mlx.tensor import Array, MLXTensor, computing, mx
from blockdraft.nn.cache import KVCache


class MLXCache(KVCache):
    """A `KVCache` whose layers are MLX arrays `[heads, slots, D]`.

    Nothing is computed before somebody waits for what depends on it. A path that is no prefix of the nodes is gathered;
    of a chain only the number of its tokens is kept. A single row is read in place, and several are put side by side.
    """

    def layer(self, layer: int, *nodes: Tensor) -> tuple[Tensor, ...]:
        """As in `KVCache`."""
        if layer not in self._layers:
            with computing():
                shapes = [
                    ((n.size(1), self._slots, n.size(3)), n.array.dtype) for n in nodes if isinstance(n, MLXTensor)
                ]
                self._layers[layer] = tuple(MLXTensor(mx.zeros(shape, dtype=kind)) for shape, kind in shapes)
        return self._layers[layer]

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        with computing():
            super().commit(path)

    def extend(self, layer: int, *nodes: Array) -> list[Array]:
        """Write nodes `[B, heads, N, D]` behind each row's committed tokens.

        Returns:
            What the rows hold then, `[B, heads, T, D]` for each, as `read`.
        """
        count = nodes[0].shape[2]
        stores: Any = self.layer(layer, *[MLXTensor(each) for each in nodes])
        self.check_room(count)
        for store, new in zip(stores, nodes, strict=True):
            if len(self.rows) == 1:
                first = self.rows[0] + self.lengths[0]
                store.array[:, first : first + count] = new[0]
            else:
                firsts = torch.tensor(self.rows) + torch.tensor(self.lengths)
                at = mx.array((firsts[:, None] + torch.arange(count)).numpy())
                store.array[:, at] = new.swapaxes(0, 1)
        return self.read(layer, count)

    def read(self, layer: int, count: int = 0, first: int = 0) -> list[Array]:
        """Slots of the rows side by side, from slot `first` on, with `count` nodes behind the committed tokens of the
        longest row. Of a shorter row further slots are its first one, which masks hide."""
        end, stores = max(self.lengths) + count, self._layers[layer]
        if len(self.rows) == 1:
            row = self.rows[0]
            return [store.array[None, :, row + first : row + end] for store in stores]  # type: ignore[attr-defined]
        slots = torch.arange(first, end).repeat(len(self.rows), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        at = mx.array((torch.where(slots < own, slots, 0) + torch.tensor(self.rows)[:, None]).numpy())
        return [store.array[:, at].swapaxes(0, 1) for store in stores]  # type: ignore[attr-defined]

    def view(self, memory: Tensor, count: int, end: int | None = None) -> tuple[Tensor, bool]:
        raise NotImplementedError("arrays are read with `read`")
