"""Attention for exact forwards, whose results do not depend on the order in which it adds.

A sum in float32 depends on the order of its terms, and the keys that a node sees are at other slots in a tree than in
plain decoding. Here everything from the scores to the weighted sum is float64 and is rounded once, at the end: sums in
different orders then differ so little that they nearly always round to the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_NODES = 16  # nodes of every piece of an exact forward, so that all products have one shape


@dataclass(frozen=True)
class PieceRow:
    """Nodes of one row in a piece.

    Attributes:
        nodes: Range of these nodes in the piece.
        slots: Slots of the row, up to that of the last node.
        visible: `[nodes, slots]` bool, which node sees which slot.
    """

    nodes: slice
    slots: slice
    visible: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Attention of the nodes of a piece in the layers of one window.

    A piece has `EXACT_NODES` nodes, of one row or several. The last ones may be padding: they belong to no row, are not
    stored, and see nothing.

    Attributes:
        slots: Slots of the other nodes, `[n]` int64, counted through the whole memory.
        rows: The rows that these nodes belong to.
    """

    slots: Tensor
    rows: Sequence[PieceRow]

    def write(self, memory: Tensor, nodes: Tensor) -> None:
        """Write keys or values of a piece, `[1, EXACT_NODES, heads, D]`, to a layer's memory `[heads, slots, D]`."""
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
            `[1, EXACT_NODES, heads, D]`, zeros for padding.
        """
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for row in self.rows:
            own = keys[:, row.slots], values[:, row.slots]
            out[0, row.nodes] = attend_in_float64(queries[0, row.nodes], *own, row.visible, scale, softcap)
        return out


def attend_in_float64(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention in float64, rounded once to the dtype of the queries.

    Args:
        queries: `[n, heads, D]`.
        keys, values: `[kv_heads, T, D]`.
        visible: `[n, T]` bool, which node sees which slot.
        scale, softcap: As in `ExactAttention.attend`.

    Returns:
        `[n, heads, D]`.
    """
    (count, heads, head_dim), kv_heads = queries.shape, len(keys)
    # The query heads of a group are further nodes of their key/value head.
    grouped = queries.double().view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ keys.double().mT) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(kv_heads, -1, *visible.shape).masked_fill_(~visible, -torch.inf)
    out = scores.softmax(dim=-1).flatten(1, 2) @ values.double()
    return out.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(queries.dtype)


def attention_bytes(heads: int, kv_heads: int, head_dim: int, slots: int) -> int:
    """Bytes that the attention of a piece takes meanwhile, on rows of `slots` slots: for keys and values, scores and
    weights in float64."""
    return (2 * kv_heads * head_dim + 2 * EXACT_NODES * heads) * slots * torch.float64.itemsize
