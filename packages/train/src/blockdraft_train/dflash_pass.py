"""The draft pass of training (arXiv 2602.06036): the blocks of many anchors at once, independent of each other.

A block at anchor p holds `[x_p, mask, ..., mask]` at positions p, p+1, ... It attends to the hidden states of its
own document's tokens strictly before p, because those of the anchor do not exist yet when a block is drafted.

Letters: B rows, S tokens per row, A anchors per row, N positions per block, H hidden size, F = m * H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.nn.draft_network import Attend


def mask_rule(documents_BS: Tensor, anchors_BA: Tensor, block_size: int, kind: LayerAttention) -> Callable[..., Tensor]:
    """Return the block mask: a function from indices to whether a query may attend to a key. All masks are made of it.

    Query i is slot `i % N` of the row's block `i // N`. The first S keys are the row's tokens, and key S + i belongs to
    query i. A slot attends to

    - tokens of the anchor's document before the anchor; with a window W only those less than W positions before the
      slot;
    - slots of its own block; in a causal layer only those up to itself, and with a window W only those less than W
      away.

    Args:
        documents_BS: Int64, index of the document within the row that each token belongs to; -1 for none.
        anchors_BA: Int64, index of each anchor within the row; -1 for no block, whose slots attend only to each other.
        block_size: N.

    Returns:
        A function of a row, a head (ignored), a query and a key, each a tensor, whose shapes broadcast; a `mask_mod` of
        FlexAttention.
    """
    length = documents_BS.size(1)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors_BA[row, block]
        place, other = key.clamp(max=length - 1), (key - length).clamp(min=0)
        same = documents_BS[row, place] == documents_BS[row, anchor.clamp(min=0)]
        context = (key < length) & (place < anchor) & same
        within = (key >= length) & (other // block_size == block)
        if kind.causal:
            within = within & (other % block_size <= slot)
        if kind.window is not None:
            context = context & (anchor + slot - place < kind.window)
            within = within & ((other % block_size - slot).abs() < kind.window)
        return context | within

    return visible


def dense_mask(documents_BS: Tensor, anchors_BA: Tensor, block_size: int, kind: LayerAttention) -> Tensor:
    """Return `mask_rule` as a bool tensor `[B * A, N, S + N]`. The keys of a block are the tokens and its own slots."""
    (batch, length), count, device = documents_BS.shape, anchors_BA.size(1), documents_BS.device
    rows = torch.arange(batch, device=device)[:, None, None, None]
    queries = torch.arange(count * block_size, device=device).view(1, count, block_size, 1)
    tokens = torch.arange(length, device=device).expand(count, length)
    slots = length + torch.arange(count * block_size, device=device).view(count, block_size)
    keys = torch.cat([tokens, slots], dim=1)[None, :, None, :]
    visible = mask_rule(documents_BS, anchors_BA, block_size, kind)(rows, rows, queries, keys)
    return visible.flatten(0, 1)


def draft_hidden(
    network: DFlashNetwork,
    hidden_states_BSF: Tensor,
    documents_BS: Tensor,
    positions_BS: Tensor,
    anchors_BA: Tensor,
    anchor_embedding_BAH: Tensor,
    mask_embedding_H: Tensor,
    flex: bool = False,
) -> Tensor:
    """Run the draft pass over all blocks at once.

    Args:
        network, hidden_states_BSF, documents_BS, positions_BS, anchors_BA, flex: As in `draft_pass`.
        anchor_embedding_BAH: The target's embedding of the anchors' tokens.
        mask_embedding_H: Its embedding of the mask token.

    Returns:
        `[B, A, N, H]`, as the drafter computes it when it decodes at that anchor.
    """
    run = draft_pass(network, hidden_states_BSF, documents_BS, positions_BS, anchors_BA, flex)
    masks = mask_embedding_H.expand(*anchors_BA.shape, network.config.block_size - 1, -1)
    return run(torch.cat([anchor_embedding_BAH.unsqueeze(2), masks], dim=2))


def draft_pass(
    network: DFlashNetwork,
    hidden_states_BSF: Tensor,
    documents_BS: Tensor,
    positions_BS: Tensor,
    anchors_BA: Tensor,
    flex: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Compute the context, and return a reusable function that runs the layers over all blocks.

    Args:
        network: The draft network.
        hidden_states_BSF: Hidden states of the target layers.
        documents_BS: As in `mask_rule`.
        positions_BS: Int64, each token's position in its document.
        anchors_BA: Int64, index of each anchor within the row; a block with a negative one has no meaning.
        flex: Use FlexAttention instead of a dense mask.

    Returns:
        A function from the inputs of the slots, `[B, A, N, H]`, to their outputs, in the same shape.
    """
    keys_LBKSD, values_LBKSD = network.context(hidden_states_BSF, positions_BS)
    first = positions_BS.gather(1, anchors_BA.clamp(min=0))
    positions = (first.unsqueeze(-1) + torch.arange(network.config.block_size, device=first.device)).flatten(0, 1)
    prepare = _flex if flex else _dense
    attention = prepare(network, keys_LBKSD, values_LBKSD, documents_BS, anchors_BA)

    def run(blocks_BANH: Tensor) -> Tensor:
        hidden: Tensor = network(blocks_BANH.flatten(0, 1), positions, attention)
        return hidden.view(blocks_BANH.shape)

    return run


def _dense(
    network: DFlashNetwork, keys_LBKSD: Tensor, values_LBKSD: Tensor, documents: Tensor, anchors: Tensor
) -> Attend:
    """Return attention with a dense mask.

    One softmax covers a sequence's context, for all its blocks together, and each block's own positions.
    """
    config, (batch, count), length = network.config, anchors.shape, documents.size(1)
    size, kv_heads = config.block_size, config.num_key_value_heads
    hidden = {
        kind: ~dense_mask(documents, anchors, size, kind).view(batch, 1, 1, count * size, length + size)
        for kind in set(config.layers)
    }

    def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # All queries that share a key/value head, of its G query heads and A blocks: [B, K, G, A, N, D].
        grouped = (batch, count, kv_heads, -1, size, queries.size(-1))
        own_keys, own_values = (x.view(grouped).permute(0, 2, 3, 1, 4, 5) for x in (keys, values))
        rows = (queries * queries.size(-1) ** -0.5).view(grouped).permute(0, 2, 3, 1, 4, 5)
        rows, own_keys = rows.to(values.dtype), own_keys.to(values.dtype)  # under autocast, norms return float32
        to_context = rows.flatten(2, 4) @ keys_LBKSD[layer].to(values.dtype).mT
        to_own = (rows @ own_keys.mT).flatten(3, 4)
        scores = torch.cat([to_context.view(*to_own.shape[:4], length), to_own], dim=-1)
        scores = scores.masked_fill(hidden[config.layers[layer]], -torch.inf)
        probs = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        from_context = probs[..., :length].flatten(2, 3) @ values_LBKSD[layer]
        from_own = probs[..., length:].unflatten(3, (count, size)) @ own_values
        out: Tensor = from_context.view_as(rows) + from_own
        return out.permute(0, 3, 1, 2, 4, 5).reshape(queries.shape)

    return attention


def _flex(
    network: DFlashNetwork, keys_LBKSD: Tensor, values_LBKSD: Tensor, documents: Tensor, anchors: Tensor
) -> Attend:
    """Return FlexAttention over all blocks of a row together. It skips tiles without visible keys."""
    config, (batch, count), device = network.config, anchors.shape, anchors.device
    queries_of_row = count * config.block_size
    keys_of_row = documents.size(1) + queries_of_row
    # A compiled step traces both. On a CPU they run uncompiled, slowly, for tests.
    alone = device.type != "cpu" and not torch.compiler.is_compiling()
    make, attend_flexibly = (_compiled(create_block_mask), _compiled(flex_attention)) if alone else _FLEX
    masks = {
        kind: make(
            mask_rule(documents, anchors, config.block_size, kind),
            B=batch,
            H=None,
            Q_LEN=queries_of_row,
            KV_LEN=keys_of_row,
            device=device,
        )
        for kind in set(config.layers)
    }

    def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        joined = [_by_row(x, batch) for x in (queries, keys, values)]
        values = torch.cat([values_LBKSD[layer], joined[2]], dim=2)
        keys = torch.cat([keys_LBKSD[layer], joined[1]], dim=2).to(values.dtype)
        out = attend_flexibly(
            joined[0].to(values.dtype), keys, values, block_mask=masks[config.layers[layer]], enable_gqa=True
        )
        heads, dim = out.size(1), out.size(3)
        return cast(
            Tensor, out.view(batch, heads, count, -1, dim).transpose(1, 2).reshape(batch * count, heads, -1, dim)
        )

    return attention


_FLEX: tuple[Any, Any] = (create_block_mask, flex_attention)
_COMPILED: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]


def _by_row(x: Tensor, batch: int) -> Tensor:
    """Reshape `[B * A, heads, N, D]` to `[B, heads, A * N, D]`."""
    rows: Tensor = x.unflatten(0, (batch, -1))
    return rows.transpose(1, 2).flatten(2, 3)
