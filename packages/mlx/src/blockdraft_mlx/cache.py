"""Key/value cache in MLX arrays."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft_mlx.tensor import MLXTensor, computing, in_mlx, mx


class MLXCache(KVCache):
    """A `KVCache` whose layers are MLX arrays `[heads, KV slots, D]`, written lazily.

    One sequence is read in place, and several are copied side by side.
    """

    def allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        with computing():
            return MLXTensor(mx.zeros(shape, dtype=in_mlx(like).dtype))

    def extend(self, store: Tensor, nodes: Iterable[Tensor]) -> None:
        assert isinstance(nodes, Tensor)
        own, new = in_mlx(store), in_mlx(nodes)
        self.check_room(new.shape[2])
        slots = self.memory_slots(new.shape[2])
        with computing():
            if len(slots) == 1:
                own[:, int(slots[0, 0]) : int(slots[0, -1]) + 1] = new[0]
            else:
                own[:, mx.array(slots.numpy())] = new.swapaxes(0, 1)

    def view(self, memory: Tensor, count: int = 0, end: int | None = None) -> tuple[Tensor, bool]:
        end = max(self.lengths) + count
        if len(self.starts) == 1:
            return memory[None, :, self.starts[0] : self.starts[0] + end], False
        return self.gathered(memory, count, end), False
