"""Compilation by torch.compile: which functions, for which shapes, and in which thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from blockdraft.errors import describe
from blockdraft.nn.decoder_layer import RunLayer

MOST_SHAPES = 256  # versions of a function that torch.compile keeps
COMPILING = threading.Lock()  # held by a thread that compiles, and during a capture, which work of others would break

Function: TypeAlias = Callable[..., Any]


def compiled(function: Function, dynamic: Mapping[int, int]) -> Function:
    """Return a function compiled by torch.compile, as one graph, anew for each shape.

    Args:
        dynamic: Positions of arguments that are tensors, and their dimension that may change without compiling again.
    """
    run = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*args: Any) -> Any:
        from torch import _dynamo  # takes seconds to import

        _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, MOST_SHAPES)
        for position, dimension in dynamic.items():
            _dynamo.mark_dynamic(args[position], dimension)
        return run(*args)

    return call


def compiled_layers() -> RunLayer:
    """Return a function that runs layers of a decoder compiled, as `run_layer` of `Decoder.forward`.

    Layers share compiled code, so a decoder compiles as fast as its different layers. The number of KV slots, the last
    dimension of the mask, may change.
    """

    def call_layer(
        layer: Any, x: Tensor, angles: tuple[Tensor, Tensor], slots: Tensor, mask: Tensor, store: Tensor
    ) -> Tensor:
        out: Tensor = layer(x, angles, slots, mask, store)
        return out

    return compiled(call_layer, {4: 3, 5: 2})


class Compiler:
    """Decides when functions are compiled: at once, or in a thread while callers run without them.

    Args:
        device: Device of the functions' tensors.
        in_background: Whether to compile in a thread.

    Attributes:
        reason: Why a compilation in the background failed, after which callers do without; else None.
    """

    reason: str | None = None

    def __init__(self, device: torch.device, in_background: bool) -> None:
        self._device, self._in_background = device, in_background
        self._begun, self._done = set[Hashable](), set[Hashable]()

    def ready(self, key: Hashable, warm_up: Callable[[], object]) -> bool:
        """Return whether functions are compiled for some shapes, or never will be, and no thread compiles others.

        Args:
            key: Names functions and shapes.
            warm_up: Calls the functions with tensors of these shapes, so that they are compiled. It runs in a thread,
                without gradients.
        """
        if not self._in_background:
            return True  # the first call compiles
        if key not in self._begun and self.reason is None:
            self._begun.add(key)
            threading.Thread(target=self._compile, args=(key, warm_up), name="compiler", daemon=True).start()
        return (key in self._done or self.reason is not None) and not COMPILING.locked()

    def _compile(self, key: Hashable, warm_up: Callable[[], object]) -> None:
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None
        with COMPILING, torch.no_grad(), torch.cuda.stream(stream):
            if self.reason is not None:
                return
            try:
                warm_up()
                if stream is not None:
                    stream.synchronize()
                self._done.add(key)
            except Exception as error:  # of any kind: torch.compile runs compilers, whose errors have many classes
                self.reason = f"torch.compile failed: {describe(error)}"
                logging.getLogger(__name__).warning("CUDA graphs run uncompiled, which is slower: %s.", self.reason)
