"""Memory of an engine, computed from a model's dimensions by the engine's own `Memory`."""

from __future__ import annotations

from typing import Any

import torch

from blockdraft.drafters import DraftCost
from blockdraft.engine.kv_slots import Memory
from blockdraft_radar.drafting import draft_weights, head_weights
from blockdraft_radar.shape import Shape, kv_cache_bytes
from blockdraft_radar.step import PREFILL_TOKENS


def memory_of(shape: Shape, bits: float, context: int, batch: int, size: int, cost: DraftCost | None) -> dict[str, int]:
    """Return the bytes of weights, drafter, caches and workspace of an engine.

    Args:
        bits: Bits per weight.
        size: Nodes per sequence in a forward pass.
        cost: Cost of the drafter; None without a drafter.
    """
    target: Any = _Target(shape, context)
    drafter: Any = _Drafter(shape, cost)
    memory = Memory(target, drafter, batch, size, min(PREFILL_TOKENS, context), False)
    slots = batch * (context + size)
    draft_bytes = 0
    if cost is not None:
        own_head = head_weights(shape, cost) if cost.head_vocabulary is not None else 0
        draft_bytes = 2 * (draft_weights(shape, cost) + own_head)
    return {
        "weights": int(shape.parameters * bits / 8),
        "drafter": draft_bytes,
        "caches": memory.caches(slots),
        "workspace": memory.workspace(slots),
    }


class _Target:
    """The part of the target protocol that `Memory` reads, for a model that is not loaded."""

    def __init__(self, shape: Shape, context: int) -> None:
        self.shape, self.max_context = shape, context
        self.vocab_size, self.hidden_size = shape.vocabulary, shape.hidden
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")

    def row_slots(self, tokens: int) -> int:
        return tokens

    def cache_bytes(self, batch: int, capacity: int) -> int:
        count = -(-capacity // self.max_context) if capacity else 0
        slot_bytes = count * kv_cache_bytes(self.shape, -(-capacity // count)) if count else 0
        return batch * (slot_bytes + 4 * self.shape.recurrent_layers * self.shape.state_numbers)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        shape = self.shape
        widths = 4 * shape.hidden + 3 * shape.intermediate + 3 * shape.heads * shape.head_size
        states = 4 * shape.recurrent_layers * shape.state_numbers * batch * min(nodes, 64)
        return 2 * batch * nodes * widths + states


class _Drafter:
    """The part of the drafter protocol that `Memory` reads, for a drafter that is not loaded."""

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
