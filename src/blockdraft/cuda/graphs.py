"""Forwards of few nodes as CUDA graphs: one launch in place of hundreds, which take a GPU's host longer than the GPU.

A graph does the same operations on the same addresses each time it is replayed. So shapes are rounded up to buckets,
inputs are copied into tensors that belong to the graph, and results are copied out of it. The memory of keys and values
is part of a graph's key: a cache that lies where another one lay, in the same layout, may replay its graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.machine import send
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import bucket, slot_bucket
from blockdraft.nn.decoder import Decoder

MOST_NODES = 320  # of a captured forward, padding included
MOST_GRAPHS = 32  # of one owner; each keeps its results in memory
WARM_UPS = 2

Call: TypeAlias = Callable[..., list[Tensor]]


class Recorder(Protocol):
    """What makes graphs."""

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """The tensors that will hold a call's results, and what puts them there, each time it is called."""


class CudaRecorder:
    """Records CUDA graphs as https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs describes it.

    All graphs share one pool of memory: a replay may overwrite the results of another graph, so results have to be
    taken away, on the same stream, before anything else is replayed.
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
                for _ in range(WARM_UPS):  # libraries allocate and choose kernels at their first calls
                    call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = call()
        return results, graph.replay


class Graph(NamedTuple):
    inputs: list[Tensor]
    results: list[Tensor]
    replay: Callable[[], None]


class Graphs:
    """The graphs of one owner, whose weights they read; the least recently used ones go."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()

    def run(self, key: Hashable, call: Call, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
        """Results `[B, N, ...]` of `call(*inputs)`, of each the first `count` nodes.

        Args:
            key: Settles shapes, and whatever else `call` depends on besides the numbers in the inputs: memory that it
                reads or writes, too. A call for which there is a graph is not called.
            inputs: On the device or on the CPU.
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
        own = [torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in inputs]
        _fill(own, inputs)
        try:
            return Graph(own, *self._recorder.capture(lambda: call(*own)))
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            raise UsageError(f"A CUDA graph could not be captured: {told}. Use compile off (--compile off).") from error


def _fill(own: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for into, given in zip(own, inputs, strict=True):
        assert into.shape == given.shape and into.dtype == given.dtype, (into.shape, given.shape)
        into.copy_(send(given, into.device))


MOST_PADDING = max(bucket(count) - count for count in range(1, MOST_NODES + 1))


def room(capacity: int) -> int:
    """Slots of a store for a cache of this capacity: also for the nodes that fill up the last real ones, and so coarse
    that requests of similar lengths have stores of one layout."""
    return slot_bucket(capacity + MOST_PADDING)


def place(store: Tensor) -> Hashable:
    return store.data_ptr(), store.stride()


class CapturedDecoder:
    """A decoder's forward as graphs.

    Attributes:
        recorder: As given; a drafter of this target uses it too.
    """

    def __init__(self, decoder: Decoder, recorder: Recorder) -> None:
        self.recorder = recorder
        self._decoder = decoder
        self._graphs = Graphs(recorder, decoder.device)
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor,
        within: Tensor,
        lengths: Sequence[int],
        store: Tensor,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Score N nodes a row, and write their keys and values behind each row's committed tokens.

        Args:
            tokens: `[B, N]` int64.
            depths: `[B, M]` int64, distance from the anchor, M = `bucket(N)`: of the nodes and of those that fill up.
            within: `[B, M, M]` bool, which of these sees which. Those that fill up are seen by none of the others.
            lengths: Committed tokens of each row.
            store: `[layers, B, 2 * num_kv_heads, slots, D]`, keys before values; a view of the cache's memory.
            taps: As in `Decoder.forward`.

        Returns:
            As `Decoder.forward`.
        """
        decoder, (batch, count), padded = self._decoder, tokens.shape, depths.size(1)
        slots = slot_bucket(max(lengths) + padded)
        assert padded <= MOST_NODES and slots <= store.size(3), (padded, slots, store.shape)

        def call(tokens: Tensor, starts: Tensor, depths: Tensor, within: Tensor) -> list[Tensor]:
            positions, at = starts[:, None] + depths, starts[:, None] + torch.arange(padded, device=starts.device)
            masks = [
                grouped_mask(visible_slots(starts, within, positions, window, slots), self._group, decoder.dtype)
                for window in decoder.config.windows
            ]
            seen = store[..., :slots, :].unbind(0)
            logits, features = decoder(tokens, positions, at, masks, seen, taps)
            return [logits] if features is None else [logits, features]

        key = (place(store), batch, padded, slots, tuple(taps))
        inputs = [F.pad(tokens, (0, padded - count)), torch.tensor(lengths), depths, within]
        logits, *features = self._graphs.run(key, call, inputs, count)
        return logits, features[0] if features else None
