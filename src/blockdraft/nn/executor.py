"""Executors: each runs the forward passes of a decoder in one way, over a cache that it lays out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache, StoreShape
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig


@dataclass(frozen=True)
class TargetOutput:
    """Result of a forward pass.

    Attributes:
        logits: `[B, N, V]`, or `[B, 1, V]` for a single node per row.
        hidden_states: `[B, N, m * H]`, concatenated outputs of the target layers, if any are read.
        best: Argmax of the logits, int64, the lowest of equals; -1 where a logit is NaN or the largest is infinite.
            None if the backend has not computed it.
    """

    logits: Tensor
    hidden_states: Tensor | None
    best: Tensor | None = None


class Executor(ABC):
    """Runs the forward passes of a decoder.

    Args:
        decoder: The decoder, in evaluation mode.
        shapes: What a cache keeps, as of `store_shapes`.
    """

    def __init__(self, decoder: Decoder, shapes: Sequence[StoreShape]) -> None:
        self.decoder, self.shapes = decoder, tuple(shapes)

    @property
    def traits(self) -> list[str]:
        """What distinguishes this executor, in words for `Target.running`."""
        return []

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """As `Target.new_cache`."""

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Return the bytes of such a cache."""
        return batch * capacity * sum(shape.token_bytes for shape in self.shapes)

    def slots_for(self, tokens: int) -> int:
        """As `Target.row_slots`."""
        return tokens

    @abstractmethod
    def working_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """As `Target.forward_bytes`."""

    def step_context(self) -> AbstractContextManager[None]:
        """As `Target.step_context`."""
        return nullcontext()

    def compile_at_once(self) -> None:  # noqa: B027, most executors compile nothing later
        """As `Target.compile_at_once`."""

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        """As `Target.forward`. The caller holds the target's lock, and gradients are disabled."""


def store_shapes(
    config: DecoderConfig,
    dtype: torch.dtype,
    inputs_dtype: torch.dtype,
    slot_size: Callable[[int], int] = lambda head_dim: head_dim,
) -> list[StoreShape]:
    """Return what a cache keeps: keys before values of the layers of each shape, and inputs of short convolutions.

    Args:
        dtype, inputs_dtype: Dtypes of keys and values, and of the inputs.
        slot_size: Function from the size of a head to the numbers that are stored for it.
    """
    shapes = [
        StoreShape(len(layers), config.stored_per_head * heads, slot_size(head_dim), dtype)
        for (heads, head_dim), layers in config.memories.items()
    ]
    if config.convolved_layers:
        shapes.append(StoreShape(config.convolved_layers, 1, config.hidden_size, inputs_dtype))
    return shapes
