"""Compilation by torch.compile: which functions, for which shapes, and in which thread.

torch.compile tells sizes of one from larger ones, and takes sizes for related that are equal when it compiles. So
functions are compiled on sizes of which no two are equal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.decoder_layer import RunLayer

BACKEND = "inductor"  # which turns traced functions into kernels
MAX_SHAPES = 64  # versions of a function that torch.compile keeps
MAX_WORDS = 40  # of an error message of torch.compile that are shown
SEVERAL = 3, 5  # sequences and nodes to compile for, where there may be any number from two on
COMPILING = threading.Lock()  # held by a thread that compiles, and during a capture, which work of others would break

Function: TypeAlias = Callable[..., Any]


def compiled(function: Function, dynamic: Mapping[int, Sequence[int]]) -> Function:
    """Return a function compiled by torch.compile, as one graph.

    Args:
        dynamic: Positions of arguments that are tensors, and their dimensions that may change. Code for sizes from two
            on is shared, and each of them is compiled apart where its size is one.
    """
    run = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)

    def call(*args: Any) -> Any:
        from torch import _dynamo  # takes seconds to import

        _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, MAX_SHAPES)
        for position, dimensions in dynamic.items():
            for dimension in dimensions:
                if args[position].size(dimension) > 1:
                    _dynamo.maybe_mark_dynamic(args[position], dimension)
        return run(*args)

    return call


def compiled_layers() -> RunLayer:
    """Return a function that runs layers of a decoder compiled, as `run_layer` of `Decoder.forward`.

    Layers share compiled code, so a decoder compiles as fast as its different layers. Sequences, nodes and KV slots
    may be of any number.
    """

    def call_layer(
        layer: Any, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor, store: Tensor
    ) -> Tensor:
        out: Tensor = layer(x, (cos, sin), slots, mask, store)
        return out

    call = compiled(call_layer, {1: (0,), 2: (0, 1), 3: (0, 1), 4: (0, 1), 5: (0, 2, 3), 6: (0, 2)})

    def run_layer(layer: Any, x: Tensor, angles: tuple[Tensor, Tensor], *rest: Tensor) -> Tensor:
        out: Tensor = call(layer, x, *angles, *rest)
        return out

    return run_layer


class Compiler:
    """Decides when functions are compiled: at once, or in a thread while callers run without them.

    Args:
        device: Device of the functions' tensors.
        in_background: Whether to compile in a thread.

    Attributes:
        in_background: Whether what is new is compiled in a thread.
        reason: Why a compilation in the background failed, after which callers do without; else None.
    """

    reason: str | None = None

    def __init__(self, device: torch.device, in_background: bool) -> None:
        self._device, self.in_background = device, in_background
        self._begun, self._done = set[Hashable](), set[Hashable]()
        self._threads: list[threading.Thread] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ready(self, key: Hashable, warm_up: Callable[[], object]) -> bool:
        """Return whether functions are compiled for some kind of sizes, or never will be, and no thread compiles.

        Args:
            key: Names the functions and the kind.
            warm_up: Calls the functions with tensors of such sizes, so that they are compiled. It runs without
                gradients, in a thread if compilation is in the background.

        Raises:
            UsageError: Compilation at once failed.
        """
        if key not in self._begun and self.reason is None:
            self._begun.add(key)
            if self.in_background:
                # A thread of which the interpreter waits for the end: torch crashes if it is killed.
                self._threads.append(threading.Thread(target=self.compile, args=(key, warm_up), name="compiler"))
                self._threads[-1].start()
            else:
                self.compile(key, warm_up)
        is_idle = len(self._begun) == len(self._done) and not COMPILING.locked()
        return is_idle if self.reason is None else not COMPILING.locked()

    def compile_at_once(self) -> None:
        """Wait for what is being compiled, and compile everything else before it runs.

        Raises:
            UsageError: A compilation failed.
        """
        for thread in self._threads:
            thread.join()
        if self.reason is not None:
            raise UsageError(f"{self.reason}. Use compile off (--compile off).")
        self.in_background = False

    def compile(self, key: Hashable, warm_up: Callable[[], object]) -> None:
        with COMPILING, torch.no_grad(), torch.cuda.stream(self._stream):
            if self.reason is not None or not threading.main_thread().is_alive():
                return
            try:
                warm_up()
                if self._stream is not None:
                    self._stream.synchronize()
                self._done.add(key)
            except Exception as error:  # of any kind: torch.compile runs compilers, whose errors have many classes
                reason = f"torch.compile failed: {' '.join(str(error).split()[:MAX_WORDS])}"
                if not self.in_background:
                    self._begun.discard(key)
                    raise UsageError(f"{reason}. Use compile auto or off (--compile off).") from error
                self.reason = reason
                logging.getLogger(__name__).warning("CUDA graphs run uncompiled, which is slower: %s.", reason)
