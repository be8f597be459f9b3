"""How many slots fit, and what all of it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from blockdraft.drafters import Drafter
from blockdraft.engine.draft_context import AT_ONCE, MOST_KEPT
from blockdraft.machine import free_bytes
from blockdraft.targets import Target

SHARE = 0.9  # of the free memory


@dataclass(frozen=True)
class Memory:
    """What an engine takes.

    Args:
        nodes: Most nodes of a row.
        automatic: Whether drafting may pause.
        behind: FreeSlots that a row needs behind its text, if these are more than its nodes.
    """

    target: Target
    drafter: Drafter
    max_batch_size: int
    nodes: int
    prefill_tokens: int
    automatic: bool
    behind: int = 0

    @property
    def _most_slots(self) -> int:
        """Of a row."""
        return self.target.row_slots(self.target.max_context + max(self.nodes, self.behind))

    def bytes(self, slots: int) -> int:
        """Of both stores, allocated once, and of what a step needs meanwhile."""
        return self.stores(slots) + self.meanwhile(slots)

    def by_device(self, slots: int) -> dict[torch.device, int]:
        """The same where it is taken: a drafter may have a device of its own."""
        taken = {self.target.device: self.bytes(slots)}
        for part in self.drafter.parts:
            device = part.device or self.target.device
            size = part.state_bytes(1, slots) + self._drafting(part, slots)
            taken[self.target.device] -= size
            taken[device] = taken.get(device, 0) + size
        return taken

    def stores(self, slots: int) -> int:
        # Some targets keep something for each row besides its slots.
        of_rows = self.target.cache_bytes(self.max_batch_size, 0) - self.target.cache_bytes(1, 0)
        return self.target.cache_bytes(1, slots) + of_rows + self.drafter.state_bytes(1, slots)

    def meanwhile(self, slots: int) -> int:
        """Of the largest of forwards, with the logits of all nodes in their own dtype and twice in float32, and the
        features, by layer and side by side: of nodes, of the part of a prompt, or of a pause in drafting; and of what
        drafters do."""
        target, rows, size = self.target, self.max_batch_size, self.target.dtype.itemsize
        longest = min(slots, self._most_slots)
        forward = max(
            target.forward_bytes(rows, self.nodes, min(longest, slots // rows + 1)),
            target.forward_bytes(1, min(self.prefill_tokens, longest), longest),
        )
        logits = rows * self.nodes * target.vocab_size * (size + 2 * torch.float32.itemsize)
        tokens = max(self.prefill_tokens, rows * self.nodes)
        if self.automatic:
            tokens = max(tokens, rows * min(MOST_KEPT, target.max_context))
        features = 2 * tokens * len(self.drafter.taps) * target.hidden_size * size
        return forward + logits + features + sum(self._drafting(part, slots) for part in self.drafter.parts)

    def _drafting(self, part: Drafter, slots: int) -> int:
        """What a drafter keeps for its calls: drafts, and what it is told of."""
        told = max(self.prefill_tokens, self.max_batch_size * self.nodes, AT_ONCE if self.automatic else 0)
        reached = max(min(slots, self._most_slots), told)
        return part.workspace_bytes(1, told, reached)

    def of_one(self, slots: int) -> dict[str, int]:
        """What one request alone takes with so many slots, by what it is taken for: weights of target and drafter,
        caches (the stores), workspace (what a step needs meanwhile)."""
        alone = replace(self, max_batch_size=1)
        weights = self.target.weight_bytes() + self.drafter.weight_bytes()
        return {"weights": weights, "caches": alone.stores(slots), "workspace": alone.meanwhile(slots)}

    def slots(self, prefix_tokens: int, limit: int | None) -> int:
        """As many as all rows may need at most, with what is remembered; fewer where the memory does not suffice."""
        wanted = self.max_batch_size * self._most_slots + prefix_tokens
        free = {device: SHARE * free_bytes(device) for device in self.by_device(0)} if limit is None else {}

        def suffices(slots: int) -> bool:
            if limit is not None:
                return self.bytes(slots) <= limit
            return all(taken <= int(free[device]) for device, taken in self.by_device(slots).items())

        if suffices(wanted):
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if suffices(middle) else (fits, middle)
        return fits
