"""Attention whose results do not show in which order it added: what exact forwards use.

A sum of rounded numbers depends on their order, and the keys that a node sees lie at other slots in a tree than in
plain decoding. Here everything from the scores to the weighted sum is float64 and is rounded once, at the end: sums in
different orders then differ by so little that nearly always the same number comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_NODES = 16  # of an exact forward, always: products of as many rows have one shape


@dataclass(frozen=True)
class PieceRow:
    """The nodes of one row in a piece.

    Attributes:
        nodes: Which of the piece they are.
        slots: Of the row, up to the last of its nodes.
        visible: `[nodes, slots]` bool.
    """

    nodes: slice
    slots: slice
    visible: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Attention of the nodes of a piece, of whichever rows they are, in the layers of one window.

    A piece has `EXACT_NODES` nodes. The last ones may fill it up: they are in no row, leave no keys and see none.

    Attributes:
        slots: Where the other nodes are kept, `[n]` int64, counted from the first slot of all.
        rows: Whose they are.
    """

    slots: Tensor
    rows: Sequence[PieceRow]

    def write(self, memory: Tensor, nodes: Tensor) -> None:
        """Put keys or values of a piece, `[1, EXACT_NODES, heads, D]`, into a layer's memory `[heads, slots, D]`."""
        memory.index_copy_(1, self.slots, nodes[0, : len(self.slots)].transpose(0, 1))

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Attention over a layer's memory.

        Args:
            queries: `[1, EXACT_NODES, heads, D]`.
            keys, values: `[kv_heads, slots, D]`; `heads` is a multiple of `kv_heads`.
            scale: Factor on the scores.
            softcap: c in c * tanh(scores / c), or None.

        Returns:
            `[1, EXACT_NODES, heads, D]`, zeros for nodes that fill up.
        """
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for row in self.rows:
            own = keys[:, row.slots], values[:, row.slots]
            out[0, row.nodes] = attend_in_float64(queries[0, row.nodes], *own, row.visible, scale, softcap)
        return out


def attend_in_float64(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of nodes `[n, heads, D]` over keys and values `[kv_heads, T, D]`, each node over those that `visible`
    `[n, T]` allows; rounded once, to the dtype of the queries. Returns `[n, heads, D]`."""
    (count, heads, head_dim), kv_heads = queries.shape, len(keys)
    # The heads of a group stand as further nodes of their key/value head.
    grouped = queries.double().view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.double().mT) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(kv_heads, -1, *visible.shape).masked_fill_(~visible, -torch.inf)
    out = scores.softmax(dim=-1).flatten(1, 2) @ values.double()
    return out.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(queries.dtype)


def attention_bytes(heads: int, kv_heads: int, head_dim: int, slots: int) -> int:
    """Memory that the attention of a piece takes meanwhile, with so many slots a row: keys and values, scores and
    weights."""
    return (2 * kv_heads * head_dim + 2 * EXACT_NODES * heads) * slots * torch.float64.itemsize
