"""Compiled forward passes of few nodes as CUDA graphs: one launch in place of hundreds, which would take longer.

A graph repeats the same operations on the same addresses. So shapes are rounded up to buckets, inputs are copied to
tensors of the graph, and results are copied out of it. The address of keys and values is part of a graph's key: a cache
at the address and in the layout of an earlier one replays its graphs.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.kernels.cuda.compiler import COMPILING, MAX_WORDS, Compiler
from blockdraft.machine import send
from blockdraft.nn.cache import KVCache, bucket, slot_bucket
from blockdraft.nn.draft_network import DraftHost

MAX_NODES = 320  # nodes of the largest captured forward pass, padding included
MAX_GRAPHS = 32  # graphs per owner; each keeps its results in memory
WARM_UPS = 2  # calls before a capture
WORTH_CALLS = 3  # calls with one key, from which on a capture in the background of other work pays
MAX_CALLS = 1024  # keys whose calls are counted

Call: TypeAlias = Callable[..., list[Tensor]]


class GraphRecorder(Protocol):
    """Maker of graphs."""

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return tensors for the results of a call, and a function that recomputes them."""


@dataclass(frozen=True, kw_only=True)
class CapturedHost(DraftHost):
    """What a captured draft network borrows from its target: its recorder and its compiler, too."""

    recorder: GraphRecorder
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
        # One capture or compilation at a time. Other threads may use the GPU meanwhile, such as those of other targets.
        with COMPILING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):  # libraries allocate memory and choose kernels on their first calls
                    call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with kept_garbage(), captured:
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
    """Graphs of one owner, which read its weights. The least recently used ones are dropped.

    Args:
        recorder: Makes the graphs.
        device: Device of their tensors.
        compiler: Compiles what the graphs hold, or None. If it does so in the background, graphs may come late or
            never: only what is called for the third time is captured, and if that fails, nothing is any more.
    """

    def __init__(self, recorder: GraphRecorder, device: torch.device, compiler: Compiler | None = None) -> None:
        self._recorder, self._device, self._compiler = recorder, device, compiler
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._calls = Counter[Hashable]()
        self._failed, self._name = False, object()

    @property
    def compiles(self) -> bool:
        """Whether what the graphs hold is to be compiled."""
        return self._compiler is not None and self._compiler.reason is None

    def run(
        self,
        key: Hashable,
        call: Call,
        inputs: Sequence[Tensor],
        count: int,
        kind: Hashable = None,
        warm_up: Callable[[], object] = list,
    ) -> list[Tensor] | None:
        """Return the first `count` nodes of each result `[B, N, ...]` of `call(*inputs)`, or None without a graph.

        Args:
            key: Everything that `call` depends on except the numbers in the inputs: shapes, and memory that it reads or
                writes. If there is a graph for the key, it is replayed, and `call` is not called.
            inputs: Tensors on the device or on the CPU.
            kind, warm_up: What to compile before a capture, as in `Compiler.ready`.

        Raises:
            UsageError: There is no compiler in the background, and the call cannot be compiled or captured.
        """
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._made(key, call, inputs, kind, warm_up)
            if graph is None:
                return None
            self._graphs[key] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            _fill(graph.inputs, inputs)
            self._graphs.move_to_end(key)
        graph.replay()
        return [result[:, :count].clone() for result in graph.results]

    def _made(
        self, key: Hashable, call: Call, inputs: Sequence[Tensor], kind: Hashable, warm_up: Callable[[], object]
    ) -> Graph | None:
        if self._compiler is None:
            return self._captured(call, inputs)
        if self._failed or not self._compiler.ready((self._name, kind), warm_up):
            return None
        if not self._compiler.in_background:
            return self._captured(call, inputs)
        self._calls[key] += 1
        if len(self._calls) > MAX_CALLS:
            self._calls.clear()
        if self._calls[key] < WORTH_CALLS:
            return None
        try:
            return self._captured(call, inputs)
        except UsageError as error:
            self._failed = True
            logging.getLogger(__name__).warning("Steps run without CUDA graphs, which is slower. %s", error)
            return None

    def _captured(self, call: Call, inputs: Sequence[Tensor]) -> Graph:
        own = [torch.empty(source.shape, dtype=source.dtype, device=self._device) for source in inputs]
        _fill(own, inputs)
        try:
            results, replay = self._recorder.capture(lambda: call(*own))
            return Graph(inputs=own, results=results, replay=replay)
        except Exception as error:  # of any kind, such as those of torch.compile
            reason = " ".join(str(error).split()[:MAX_WORDS])
            raise UsageError(
                f"A CUDA graph could not be captured: {reason}. Use compile off (--compile off)."
            ) from error


def _fill(own: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for into, given in zip(own, inputs, strict=True):
        assert into.shape == given.shape and into.dtype == given.dtype, (into.shape, given.shape)
        into.copy_(send(given, into.device))


MAX_PADDING = max(bucket(count) - count for count in range(1, MAX_NODES + 1))


def room(capacity: int) -> int:
    """Return the KV slots for a cache of this capacity, with room for padding behind the last nodes.

    They are rounded up, so that requests of similar lengths have memories of one layout. One more is never used, so
    that no graph reads a contiguous memory, for which torch.compile would compile again.
    """
    return slot_bucket(capacity + MAX_PADDING) + 1


def scratch(like: Tensor, batch: int, nodes: int) -> list[Tensor]:
    """Return zeros in all layouts of a view of a memory, `[layers, B, heads, slots, D]`, for nodes on empty sequences.

    torch.compile tells views of all sequences of a memory from others, and contiguous ones, so there is one slot more
    for each sequence.

    Args:
        like: `[layers, heads, D]`, any numbers.
    """
    layers, heads, size = like.shape
    slots = slot_bucket(nodes)
    cache = KVCache(batch, slots + 1)
    totals = [count * (slots + 1) for count in ({batch, batch + 1} if batch > 1 else {batch})]
    return [cache.view(like.new_zeros(layers, heads, total, size), nodes, slots)[0] for total in totals]


def place(store: Tensor) -> Hashable:
    """Return the address and layout of a memory, for a graph's key."""
    return store.data_ptr(), store.stride()
