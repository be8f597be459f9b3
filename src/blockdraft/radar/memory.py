"""Memory of an engine that is not there, as the engine itself plans it."""

from __future__ import annotations

from typing import Any

import torch

from blockdraft.drafters import DraftCost
from blockdraft.engine.kv_slots import Memory
from blockdraft.radar.drafting import draft_weights, head_weights
from blockdraft.radar.shape import Shape, cache_of
from blockdraft.radar.step import PREFILL_TOKENS


def memory_of(shape: Shape, bits: float, context: int, batch: int, size: int, cost: DraftCost | None) -> dict[str, int]:
    """Bytes of an engine that decodes so many texts, by the sums of `Engine.memory_bytes`.

    Args:
        bits: Of a weight.
        size: Nodes of a text in a forward.
        cost: Of the drafter; None for none.
    """
    target: Any = _Target(shape, context)
    drafter: Any = _Drafter(shape, cost)
    memory = Memory(target, drafter, batch, size, min(PREFILL_TOKENS, context), False)
    slots = batch * (context + size)
    weights = int(shape.parameters * bits / 8)
    extra = 0 if cost is None else 2 * draft_weights(shape, cost)
    extra += 2 * head_weights(shape, cost) if cost is not None and cost.head_vocabulary is not None else 0
    return {
        "weights": weights,
        "drafter": extra,
        "caches": memory.caches(slots),
        "workspace": memory.workspace(slots),
    }


class _Target:
    """What `Memory` asks of a target, of one that is not there."""

    def __init__(self, shape: Shape, context: int) -> None:
        self.shape, self.max_context = shape, context
        self.vocab_size, self.hidden_size = shape.vocabulary, shape.hidden
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")

    def row_slots(self, tokens: int) -> int:
        return tokens

    def cache_bytes(self, batch: int, capacity: int) -> int:
        rows = -(-capacity // self.max_context) if capacity else 0
        of_slots = rows * cache_of(self.shape, -(-capacity // rows)) if rows else 0
        return batch * (of_slots + 4 * self.shape.recurrent_layers * self.shape.state_numbers)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        shape = self.shape
        widths = 4 * shape.hidden + 3 * shape.intermediate + 3 * shape.heads * shape.head_size
        states = 4 * shape.recurrent_layers * shape.state_numbers * batch * min(nodes, 64)
        return 2 * batch * nodes * widths + states


class _Drafter:
    """What `Memory` asks of a drafter, of one that is not there."""

    device = None

    def __init__(self, shape: Shape, cost: DraftCost | None) -> None:
        self.shape, self.cost = shape, cost
        self.parts = [self]
        self.target_layers = range(0 if cost is None else cost.target_layers)

    def state_bytes(self, batch: int, slots: int) -> int:
        layers = 0 if self.cost is None else self.cost.layers
        return batch * slots * layers * 2 * (self.shape.hidden // 4) * 2

    def workspace_bytes(self, batch: int, observed: int, reached: int) -> int:
        return 0 if self.cost is None else 2 * observed * 4 * self.shape.hidden
