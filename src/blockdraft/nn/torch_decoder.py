"""A decoder's forward passes in torch's operations, on any device: masks, positions and recurrences of a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.decode.proposal import depths, is_chain, tree_mask
from blockdraft.machine import send
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, RecurrentCache, RecurrentState, join_states, slot_bucket
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Memory
from blockdraft.nn.executor import Executor, TargetOutput, store_shapes
from blockdraft.nn.recurrent_mixer import CHUNK, Ancestry, DeltaRecurrence, TreeRecurrence
from blockdraft.nn.short_convolution import ConvolutionMemory, ConvolutionWindow

FEW_NODES = 64  # nodes for which operations of torch between compiled products run in one thread
MAX_TREE = 256  # nodes of the largest tree to plan memory for; more nodes are chunks of a prompt


class TorchDecoder(Executor):
    """Runs torch's operations one by one.

    Args:
        decoder: The decoder, on any device.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, store_shapes(decoder.config, decoder.dtype, decoder.dtype))
        config = decoder.config
        # Query heads per key/value head, by window.
        self._groups = {
            kind.window: config.num_heads // config.kv_heads_of(layer) for layer, kind in enumerate(config.layers)
        }

    @property
    def traits(self) -> list[str]:
        return ["compiled products"] if self.decoder.embedding.kernels is not None else []

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        kind = KVCache if self.decoder.config.recurrent_net is None else RecurrentCache
        return kind(batch, capacity, self.shapes, self.decoder.device)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        return super().cache_bytes(batch, capacity) + batch * state_bytes(self.decoder.config, self.decoder.dtype)

    def slots_for(self, tokens: int) -> int:
        return slot_bucket(tokens)  # sequences of few sizes are at equal distances, which saves a copy

    def working_bytes(self, batch: int, nodes: int, slots: int) -> int:
        config, dtype = self.decoder.config, self.decoder.dtype
        masks = len(config.windows) * batch * nodes * max(self._groups.values()) * slots
        scores = batch * nodes * config.num_heads * slots
        working = (batch * nodes * layer_widths(config) + masks + scores) * dtype.itemsize
        # Sequences at unequal distances are copied into a batch, in all layers.
        return working + self.cache_bytes(batch, slots) + recurrent_bytes(config, dtype, batch, nodes)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        count, window = tokens.size(1), self.convolution_window(parents, cache)
        recurrences = self.recurrences(parents, cache)
        stores = cache.stores
        inputs = stores.pop() if window is not None else None
        views = [cache.view(store, count) for store in stores]
        positions, slots, masks = self._layout(parents, cache.lengths)
        memories = self.memories([view for view, _ in views], recurrences, inputs, window)
        # Threads of torch spin after operations, and would delay compiled products.
        kernels = self.decoder.embedding.kernels
        with nullcontext() if kernels is None or tokens.numel() > FEW_NODES else kernels.torch_threads:
            output = self.decoder(tokens, positions, slots, masks, memories, target_layers, logits_at)
        for store, (view, is_memory) in zip(stores, views, strict=True):
            if not is_memory:
                cache.put(store, view, count)
        return TargetOutput(*output)

    def memories(
        self,
        stores: Sequence[Tensor],
        recurrences: Mapping[int, DeltaRecurrence],
        inputs: Tensor | None,
        window: ConvolutionWindow | None,
    ) -> Sequence[Memory]:
        """Return the memory of each layer: its part of a store, its recurrence, or the inputs of its convolution.

        Args:
            stores: Keys and values, for each of `DecoderConfig.memories`.
            recurrences: Recurrences by layer.
            inputs, window: Inputs of short convolutions, and the slots that they use.
        """
        config = self.decoder.config
        memories: dict[int, Memory] = dict(recurrences)
        for layers, store in zip(config.memories.values(), stores, strict=True):
            memories |= zip(layers, store.unbind(0), strict=True)
        if inputs is not None and window is not None:
            convolved = [layer for layer, kind in enumerate(config.layers) if kind.convolved]
            own_inputs = zip(convolved, inputs[:, 0].unbind(0), strict=True)
            memories |= {layer: ConvolutionMemory(own, window) for layer, own in own_inputs}
        owners = (layer if kind.keys_of is None else kind.keys_of for layer, kind in enumerate(config.layers))
        return [memories.get(owner) for owner in owners]

    def recurrences(self, parents: Tensor, cache: KVCache) -> dict[int, DeltaRecurrence]:
        """Return the recurrences of a forward pass by layer. The cache computes the states after a path with them."""
        if not isinstance(cache, RecurrentCache):
            return {}
        layers = [layer for layer in cast("list[DecoderLayer]", list(self.decoder.layers)) if layer.recurrent_mixer]
        states = []
        for number, layer in enumerate(layers):
            known = cache.states(number)
            alone = known[0] if len(known) == 1 else join_states(known)
            states.append(layer.recurrent_mixer.empty(len(known)) if alone is None else alone)  # type: ignore[union-attr]
        own = self.recurrences_of(states, parents)
        cache.leave(lambda row, nodes: [recurrence.after(row, nodes) for recurrence in own])
        return {layer.number: recurrence for layer, recurrence in zip(layers, own, strict=True)}

    def recurrences_of(self, states: Sequence[RecurrentState], parents: Tensor) -> Sequence[DeltaRecurrence]:
        """Return the recurrences of the recurrent layers, given their states before the nodes."""
        ancestry = self._ancestry(parents)
        return [TreeRecurrence(state, ancestry) for state in states]

    def _ancestry(self, parents: Tensor) -> Ancestry:
        assert self.decoder.config.recurrent_net is not None
        (batch, count), kernel = parents.shape, self.decoder.config.recurrent_net.kernel
        shown = parents[:1, :CHUNK] if is_chain(parents) else parents
        before = torch.arange(-1, kernel - 2).expand(batch, -1)
        previous = torch.cat([before, parents + kernel - 1], dim=1)
        places = [torch.arange(kernel - 1, kernel - 1 + count).expand(batch, -1)]
        for _ in range(kernel - 1):
            places.append(previous.gather(1, places[-1]))
        within = send(tree_mask(shown).unsqueeze(1), self.decoder.device)
        return Ancestry(within, send(torch.stack(places), self.decoder.device))

    def convolution_window(self, parents: Tensor, cache: KVCache) -> ConvolutionWindow | None:
        """Return the slots that the short convolutions of the nodes use, or None without any."""
        if not self.decoder.config.convolved_layers:
            return None
        starts, lengths = (torch.tensor(values)[:, None] for values in (cache.starts, cache.lengths))
        window = ConvolutionWindow.of(parents, starts, lengths, self.decoder.config.conv_kernel)
        return window.to(self.decoder.device)

    def _layout(self, parents: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return positions, KV slots and masks of the nodes for `Decoder.forward`."""
        config, device = self.decoder.config, self.decoder.device
        count, starts = parents.size(1), set(lengths)
        end, is_line = max(starts) + count, count == 1 or is_chain(parents)
        slots = torch.arange(end - count, end, device=device)
        if len(starts) > 1:
            slots = send(torch.tensor(lengths), device)[:, None] + torch.arange(count, device=device)
        positions = slots if slots.ndim == 2 else slots[None]
        if not is_line:
            positions = positions[:, :1] + send(depths(parents), device)
        # Without a window, a single node on sequences of one length, or a chain on empty sequences, needs no mask.
        is_plain = config.attention_softcap is None and not config.sinks
        unmasked = len(starts) == 1 and (count == 1 or (is_line and end == count and is_plain))
        # By window, of which None is full attention, and query heads per key/value head.
        masks: dict[tuple[int | None, int], Tensor | None] = {}
        keys = [
            (window if window is not None and window < end else None, self._groups[window]) for window in config.windows
        ]
        for reached, group in keys:
            if (reached, group) not in masks:
                alone = reached is None and unmasked
                masks[reached, group] = None if alone else self._mask(parents, positions, lengths, reached, group)
        return positions, slots, [masks[key] for key in keys]

    def _mask(
        self, parents: Tensor, positions: Tensor, lengths: Sequence[int], window: int | None, group: int
    ) -> Tensor:
        within = send(tree_mask(parents), self.decoder.device)
        if window is None and len(set(lengths)) == 1:  # all nodes attend to the same committed tokens
            return F.pad(grouped_mask(within, group, self.decoder.dtype), (lengths[0], 0))
        visible = visible_slots(lengths, within, positions.expand(parents.shape), window)
        return grouped_mask(visible, group, self.decoder.dtype)


def layer_widths(config: DecoderConfig) -> int:
    """Return the temporary numbers of a layer per node, without masks and scores."""
    head_dim = max(head_dim for _, head_dim in config.memories)
    attention = (5 if config.gated else 3) * config.num_heads * head_dim
    inputs = 3 * len(config.layers) * config.layer_input_size
    convolution = 16 * config.hidden_size if config.convolved_layers else 0  # their sums are float32
    return 4 * config.hidden_size + 3 * config.intermediate_size + attention + inputs + convolution


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a sequence's recurrent states."""
    net = config.recurrent_net
    if net is None:
        return 0
    inputs, wide = (net.kernel - 1) * net.channels, torch.promote_types(dtype, torch.float32).itemsize
    state = net.value_heads * net.key_dim * net.value_dim * wide
    return config.recurrent_layers * (inputs * dtype.itemsize + state)


def recurrent_bytes(config: DecoderConfig, dtype: torch.dtype, batch: int, nodes: int) -> int:
    """Return the bytes that recurrent layers take for a forward pass, and leave for `commit`."""
    net = config.recurrent_net
    if net is None:
        return 0
    wide, scored = torch.promote_types(dtype, torch.float32).itemsize, batch * nodes
    entering = net.value_heads * (2 * net.key_dim + net.value_dim)
    left = scored * (sum([*net.inputs.values(), *net.gates.values()]) * dtype.itemsize + (entering + net.values) * wide)
    # One layer at a time has the window of the convolution, and some tensors of pairs of nodes of one sequence.
    pairs = 6 * scored * net.value_heads * min(nodes, MAX_TREE)
    working = (2 * scored * net.channels + 2 * scored * entering + pairs) * wide
    return config.recurrent_layers * left + working + 2 * batch * state_bytes(config, dtype)
