"""The recurrences of a forward of our own decoder, over a `StatesCache`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from blockdraft.decode.proposal import is_chain, tree_mask
from blockdraft.machine import send
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.delta_net import CHUNK, Ancestry, DeltaRecurrence, ExactRecurrence, TreeRecurrence
from blockdraft.nn.states import State, StatesCache, joined

MOST_TREE = 256  # nodes of trees, for which memory is planned; more are those of prompts, which are lines


def recurrences(decoder: Decoder, cache: StatesCache, parents: Tensor, exact: bool) -> dict[int, DeltaRecurrence]:
    """Those of a forward, by the numbers of their layers. `leave` lets the cache know of them.

    Args:
        parents: `[B, N]`, as in `Target.forward`.
        exact: Whether the nodes come in pieces.
    """
    found: dict[int, DeltaRecurrence] = {}
    layers = [cast(DecoderLayer, layer) for layer in decoder.layers]
    family, above = None if exact else ancestry(parents, decoder), parents.tolist() if exact else []
    for layer in layers:
        net = layer.delta_net
        if net is None:
            continue
        states = cache.states(len(found))
        alone = states[0] if len(states) == 1 else joined(states)
        state = net.empty(len(states)) if alone is None else alone
        found[layer.number] = ExactRecurrence(state, above) if family is None else TreeRecurrence(state, family)
    return found


def leave(cache: StatesCache, run: dict[int, DeltaRecurrence]) -> None:
    """Let `commit` know what a forward computes."""

    def after(place: int, nodes: list[int]) -> list[State]:
        return [each.after(place, nodes) for each in run.values()]

    cache.leave(after)


def ancestry(parents: Tensor, decoder: Decoder) -> Ancestry:
    assert decoder.config.delta_net is not None
    (batch, count), kernel = parents.shape, decoder.config.delta_net.kernel
    shown = parents[:1, :CHUNK] if is_chain(parents) else parents
    before = torch.arange(-1, kernel - 2).expand(batch, -1)
    previous = torch.cat([before, parents + kernel - 1], dim=1)
    places = [torch.arange(kernel - 1, kernel - 1 + count).expand(batch, -1)]
    for _ in range(kernel - 1):
        places.append(previous.gather(1, places[-1]))
    within = send(tree_mask(shown).unsqueeze(1), decoder.device)
    return Ancestry(within, send(torch.stack(places), decoder.device))


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Memory of the states of a row."""
    net = config.delta_net
    if net is None:
        return 0
    inputs, wide = (net.kernel - 1) * net.channels, torch.promote_types(dtype, torch.float32).itemsize
    return (len(config.layers) - config.attention_layers) * (
        inputs * dtype.itemsize + net.value_heads * net.key_dim * net.value_dim * wide
    )


def working_bytes(config: DecoderConfig, dtype: torch.dtype, batch: int, nodes: int) -> int:
    """Memory that recurrent layers take for a forward and leave for `commit`."""
    net = config.delta_net
    if net is None:
        return 0
    wide, rows = torch.promote_types(dtype, torch.float32).itemsize, batch * nodes
    entering = net.value_heads * (2 * net.key_dim + net.value_dim)
    left = rows * (sum(net.inputs.values()) * dtype.itemsize + (entering + net.values) * wide)
    # Of one layer: the window of the convolution, and some tensors of pairs of nodes of the same row.
    pairs = 6 * rows * net.value_heads * min(nodes, MOST_TREE)
    working = (2 * rows * net.channels + 2 * rows * entering + pairs) * wide
    return (len(config.layers) - config.attention_layers) * left + working + 2 * batch * state_bytes(config, dtype)
