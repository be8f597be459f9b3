"""Attention over a cache and new nodes: masks, the functions that compute it, and an exact variant.

The exact variant does not depend on the order in which it adds. A float32 sum does, and the keys that a node sees are
at other KV slots in a tree than in plain decoding. So scores, softmax and the weighted sum are float64 and rounded
once, at the end. Sums in different orders then differ so little that they nearly always round to the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.machine import send

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Visible: TypeAlias = "Tensor | BlockMask"  # which node attends to which slot, as a tensor or a mask of FlexAttention


def visible_slots(
    lengths: Sequence[int] | Tensor,
    within_BNN: Tensor,
    positions_BN: Tensor | None = None,
    window: int | None = None,
    total: int | None = None,
) -> Tensor:
    """Return the mask of the slots that N nodes behind each sequence's committed tokens attend to.

    A node attends to every committed token of its sequence and to the nodes that `within_BNN` allows. With a window W,
    it attends only to those less than W positions away.

    Args:
        lengths: Number of committed tokens of each sequence; committed slot s has position s. May be a tensor `[B]` if
            `total` is given.
        within_BNN: `[B, N, N]` bool, whether node i attends to node j.
        positions_BN: Positions of the nodes, needed with a window.
        window: Sliding window in tokens.
        total: Number T of slots. No node attends to those beyond the nodes. None is max(lengths) + N.

    Returns:
        `[B, N, T]` bool.
    """
    batch, count, _ = within_BNN.shape
    device = within_BNN.device
    if isinstance(lengths, Tensor):
        assert total is not None
        starts = lengths
    else:
        starts = send(torch.tensor(lengths), device)
        total = max(lengths) + count if total is None else total
    slots = torch.arange(total, device=device)
    visible = (slots < starts[:, None, None]).expand(batch, count, total).clone()
    node_slots = starts[:, None] + torch.arange(count, device=device)
    visible.scatter_(2, node_slots[:, None, :].expand(batch, count, count), within_BNN)
    if window is not None:
        assert positions_BN is not None
        slot_positions = slots.repeat(batch, 1).scatter(1, node_slots, positions_BN)
        visible &= (positions_BN[:, :, None] - slot_positions[:, None, :]).abs() < window
    return visible


def additive_mask(visible_BNT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask `[B, 1, N, T]` to add to scores: 0 where visible, the dtype's lowest number elsewhere."""
    mask = torch.zeros(visible_BNT.shape, dtype=dtype, device=visible_BNT.device)
    return mask.masked_fill_(~visible_BNT, torch.finfo(dtype).min).unsqueeze(1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible | None) -> Tensor:
    """Compute scaled dot-product attention with grouped key/value heads.

    Args:
        queries: `[B, heads, N, D]`.
        keys, values: `[B, kv_heads, T, D]`; `heads` is a multiple of `kv_heads`.
        visible: `[B, N, T]` bool, or None if every query attends to every key. A mask of FlexAttention selects
            FlexAttention, which skips blocks of keys that no query attends to.

    Returns:
        `[B, heads, N, D]`.
    """
    if visible is not None and not isinstance(visible, Tensor):
        out: Tensor = _flex(queries.is_cuda)(queries, keys, values, block_mask=visible, enable_gqa=True)
        return out
    mask = None if visible is None else visible.unsqueeze(1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # takes seconds, and only training needs it

    if compiled:
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention


def attend_grouped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of a few nodes, with the query heads of a group as further queries of their key/value head.

    So each key is read once per group, and the matrix products are larger.

    Args:
        queries: `[B, N, heads, D]`.
        keys, values: `[B, kv_heads, T, D]`; `heads` is a multiple of `kv_heads`, a group is `heads / kv_heads`.
        mask: Result of `grouped_mask`, `[B or 1, 1, group * N, T]` in the dtype of the queries, which is added to the
            scores. With None each node attends to the slots up to its own; this needs N = 1, or N = T and neither
            soft-cap nor sinks.
        scale: Factor on the scores.
        softcap: c in c * tanh(scores / c), or None.
        causal: If False, each node attends to all slots if there is no mask.
        sinks: `[heads]`, a further score in the softmax of each head, which has no key and no value; or None.

    Returns:
        `[B, N, heads * D]`.
    """
    batch, count, heads, head_dim = queries.shape
    kv_heads = keys.size(1)
    if mask is None and count > 1 and causal:
        assert softcap is None and sinks is None and keys.size(2) == count
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(-2)
    grouped = (batch, count, kv_heads, heads // kv_heads, head_dim)
    stacked = queries.reshape(grouped).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = stacked @ keys.mT
        scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
        scores = scores if mask is None else scores + mask
        if sinks is None:
            weights = scores.softmax(dim=-1, dtype=torch.float32)
        else:
            own = sinks.view(kv_heads, -1).repeat_interleave(count, dim=1)
            weights = _softmax_with_sinks(scores.float(), own.float().unsqueeze(-1))
        out = weights.to(values.dtype) @ values
    return out.view(batch, kv_heads, -1, count, head_dim).permute(0, 3, 1, 2, 4).reshape(batch, count, -1)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the weights of scores `[..., T]` beside sinks, broadcastable to `[..., 1]`."""
    everything = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return everything.softmax(dim=-1)[..., :-1]


def grouped_mask(visible_BNT: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return the mask `[B, 1, group * N, T]` for `attend_grouped`."""
    return additive_mask(visible_BNT, dtype).repeat(1, 1, group, 1)


EXACT_NODES = 16  # nodes of each piece of an exact forward pass, so that all products have one shape


@dataclass(frozen=True)
class PieceRow:
    """Nodes of one sequence in a piece.

    Attributes:
        nodes: Range of these nodes in the piece.
        slots: Slots of the sequence, up to that of the last node.
        visible: `[nodes, slots]` bool, which node attends to which slot.
    """

    nodes: slice
    slots: slice
    visible: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Attention of the nodes of a piece in the layers of one window.

    A piece has `EXACT_NODES` nodes of one or several sequences. The last ones may be padding, which is not stored and
    attends to nothing.

    Attributes:
        slots: Slots of the other nodes in the whole memory, `[n]` int64.
        rows: The sequences that these nodes belong to.
    """

    slots: Tensor
    rows: Sequence[PieceRow]

    def write(self, memory: Tensor, nodes: Tensor) -> None:
        """Write keys or values of a piece, `[1, EXACT_NODES, heads, D]`, to a layer's memory `[heads, slots, D]`."""
        memory.index_copy_(1, self.slots, nodes[0, : len(self.slots)].transpose(0, 1))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over a layer's memory.

        Args:
            queries: `[1, EXACT_NODES, heads, D]`.
            keys, values: `[kv_heads, slots, D]`; `heads` is a multiple of `kv_heads`.
            scale: Factor on the scores.
            softcap: c in c * tanh(scores / c), or None.
            sinks: As in `attend_grouped`.

        Returns:
            `[1, EXACT_NODES, heads, D]`, zeros for padding.
        """
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for row in self.rows:
            own_keys, own_values = keys[:, row.slots], values[:, row.slots]
            out[0, row.nodes] = attend_in_float64(
                queries[0, row.nodes], own_keys, own_values, row.visible, scale, softcap, sinks
            )
        return out


def attend_in_float64(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention in float64, rounded once to the dtype of the queries.

    Args:
        queries: `[n, heads, D]`.
        keys, values: `[kv_heads, T, D]`.
        visible: `[n, T]` bool, which node attends to which slot.
        scale, softcap, sinks: As in `ExactAttention.attend`.

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
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = _softmax_with_sinks(scores, sinks.double().view(kv_heads, -1, 1, 1))
    out = weights.flatten(1, 2) @ values.double()
    return out.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(queries.dtype)


def attention_bytes(heads: int, kv_heads: int, head_dim: int, slots: int) -> int:
    """Return the temporary bytes of the attention of a piece on sequences of `slots` slots, all in float64."""
    return (2 * kv_heads * head_dim + 2 * EXACT_NODES * heads) * slots * torch.float64.itemsize
