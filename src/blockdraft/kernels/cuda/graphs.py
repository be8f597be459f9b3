"""Compiled forward passes of few nodes as CUDA graphs: one launch in place of hundreds, which would take longer.

A graph repeats the same operations on the same addresses. So shapes are rounded up to buckets, inputs are copied to
tensors of the graph, and results are copied out of it. The address of keys and values is part of a graph's key: a cache
at the address and in the layout of an earlier one replays its graphs.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.kernels.cuda.compiler import COMPILING, SEVERAL, Compiler, compiled_layers
from blockdraft.machine import send
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, bucket, slot_bucket
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_layer import DecoderLayer, RunLayer
from blockdraft.nn.draft_network import DraftHost

MOST_NODES = 320  # nodes of the largest captured forward pass, padding included
MOST_GRAPHS = 32  # graphs per owner; each keeps its results in memory
WARM_UPS = 2  # calls before a capture

Call: TypeAlias = Callable[..., list[Tensor]]


class Recorder(Protocol):
    """Maker of graphs."""

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return tensors for the results of a call, and a function that recomputes them."""


@dataclass(frozen=True, kw_only=True)
class CapturedHost(DraftHost):
    """What a captured draft network borrows from its target: its recorder and its compiler, too."""

    recorder: Recorder
    compiler: Compiler | None


class CudaRecorder:
    """Recorder of CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    All graphs share one memory pool. A replay may overwrite the results of another graph, so copy results on the same
    stream before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):  # libraries allocate memory and choose kernels on their first calls
                    call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with COMPILING, kept_garbage(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = call()
        return results, graph.replay


@contextmanager
def kept_garbage() -> Iterator[None]:
    """Disable garbage collection. An earlier owner's graph that is freed during a capture would break it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graph(NamedTuple):
    inputs: list[Tensor]
    results: list[Tensor]
    replay: Callable[[], None]


class Graphs:
    """Graphs of one owner, which read its weights. The least recently used ones are dropped."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, call: Call, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return the first `count` nodes of each result `[B, N, ...]` of `call(*inputs)`.

        Args:
            key: Everything that `call` depends on except the numbers in the inputs: shapes, and memory that it reads or
                writes. If there is a graph for the key, it is replayed, and `call` is not called.
            inputs: Tensors on the device or on the CPU.
        """
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._captured(call, inputs)
            self._graphs[key] = graph
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            _fill(graph.inputs, inputs)
            self._graphs.move_to_end(key)
        graph.replay()
        return [result[:, :count].clone() for result in graph.results]

    def _captured(self, call: Call, inputs: Sequence[Tensor]) -> Graph:
        own = [torch.empty(source.shape, dtype=source.dtype, device=self._device) for source in inputs]
        _fill(own, inputs)
        try:
            results, replay = self._recorder.capture(lambda: call(*own))
            return Graph(inputs=own, results=results, replay=replay)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"A CUDA graph could not be captured: {reason}. Use compile off (--compile off)."
            ) from error


def _fill(own: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for into, given in zip(own, inputs, strict=True):
        assert into.shape == given.shape and into.dtype == given.dtype, (into.shape, given.shape)
        into.copy_(send(given, into.device))


MOST_PADDING = max(bucket(count) - count for count in range(1, MOST_NODES + 1))


def room(capacity: int) -> int:
    """Return the KV slots for a cache of this capacity, with room for padding behind the last nodes.

    They are rounded up, so that requests of similar lengths have memories of one layout. One more is never used, so
    that no graph reads a contiguous memory, for which torch.compile would compile again.
    """
    return slot_bucket(capacity + MOST_PADDING) + 1


def scratch(store: Tensor, batch: int, nodes: int) -> list[Tensor]:
    """Return zeros in all layouts of a view of a memory, `[layers, B, heads, slots, D]`, for nodes on empty sequences.

    torch.compile tells views of all sequences of a memory from others, and contiguous ones, so there is one slot more
    for each sequence.
    """
    layers, _, heads, _, size = store.shape
    slots = slot_bucket(nodes)
    cache = KVCache(batch, slots + 1)
    totals = [count * (slots + 1) for count in ({batch, batch + 1} if batch > 1 else {batch})]
    return [cache.view(store.new_zeros(layers, heads, total, size), nodes, slots)[0] for total in totals]


def place(store: Tensor) -> Hashable:
    """Return the address and layout of a memory, for a graph's key."""
    return store.data_ptr(), store.stride()


class CapturedDecoder:
    """A decoder's forward pass as graphs. The target's drafters use its recorder and compiler too.

    Args:
        decoder: The decoder.
        recorder: Makes the graphs.
        compiler: Compiles what they hold. None leaves torch's operations as they are.
    """

    def __init__(self, decoder: Decoder, recorder: Recorder, compiler: Compiler | None = None) -> None:
        self.recorder, self.compiler = recorder, compiler
        self._decoder = decoder
        self._compiled_layer = None if compiler is None else compiled_layers()
        self._graphs = Graphs(recorder, decoder.device)
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor,
        within: Tensor,
        lengths: Sequence[int],
        store: Tensor,
        target_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None] | None:
        """Score N nodes per sequence, and write their keys and values behind each sequence's committed tokens.

        Args:
            tokens: `[B, N]` int64.
            depths: `[B, M]` int64, distances from the anchor of the N nodes and of padding, M = `bucket(N)`.
            within: `[B, M, M]` bool, whether node i attends to node j. No node attends to padding, except itself.
            lengths: Number of committed tokens of each sequence.
            store: View of the cache's memory, `[layers, B, 2 * num_kv_heads, slots, D]`, keys before values.
            target_layers: As in `Decoder.forward`.

        Returns:
            As `Decoder.forward`; None while the compiler works.
        """
        decoder, (batch, count), padded = self._decoder, tokens.shape, depths.size(1)
        slots = slot_bucket(max(lengths) + padded)
        assert padded <= MOST_NODES and slots <= store.size(3), (padded, slots, store.shape)

        def score(store: Tensor, tokens: Tensor, starts: Tensor, depths: Tensor, within: Tensor) -> list[Tensor]:
            slots = store.size(3)
            count = tokens.size(1)
            positions, at = starts[:, None] + depths, starts[:, None] + torch.arange(count, device=starts.device)
            masks = [
                grouped_mask(visible_slots(starts, within, positions, window, slots), self._group, decoder.dtype)
                for window in decoder.config.windows
            ]
            stores, run = store.unbind(0), self._run_layer()
            logits, hidden_states = decoder(tokens, positions, at, masks, stores, target_layers, run_layer=run)
            return [logits] if hidden_states is None else [logits, hidden_states]

        several, nodes = SEVERAL if self._group != SEVERAL[0] else (SEVERAL[0] + 1, SEVERAL[1])
        kind = (several if batch > 1 else 1, nodes if padded > 1 else 1)

        def warm_up() -> None:
            for memory in scratch(store[:1], *kind):
                zeros = torch.zeros(kind, dtype=torch.int64, device=decoder.device)
                within = torch.zeros(*kind, kind[1], dtype=torch.bool, device=decoder.device)
                same_for_all = memory.expand(len(store), -1, -1, -1, -1)
                score(same_for_all, zeros, zeros.new_zeros(kind[0]), zeros, within)

        key = (place(store), batch, padded, slots, tuple(target_layers))
        inputs = [F.pad(tokens, (0, padded - count)), torch.tensor(lengths), depths, within]
        compiler = self.compiler
        if compiler is not None and key not in self._graphs and not compiler.ready((id(self), *kind), warm_up):
            return None
        logits, *hidden_states = self._graphs.run(key, partial(score, store[..., :slots, :]), inputs, count)
        return logits, hidden_states[0] if hidden_states else None

    def _run_layer(self) -> RunLayer:
        fails = self.compiler is not None and self.compiler.reason is not None
        return DecoderLayer.__call__ if self._compiled_layer is None or fails else self._compiled_layer
