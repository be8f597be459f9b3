"""Plans the memory of an engine: how many cache slots fit, and what everything takes."""

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
    """Memory of an engine, in bytes.

    Attributes:
        nodes: Most nodes of a row.
        automatic: Whether drafting may pause.
        behind: Slots that a row needs behind its text, where these are more than its nodes.
    """

    target: Target
    drafter: Drafter
    max_batch_size: int
    nodes: int
    prefill_tokens: int
    automatic: bool
    behind: int = 0

    @property
    def _most_row_slots(self) -> int:
        """Slots of the longest possible row."""
        return self.target.row_slots(self.target.max_context + max(self.nodes, self.behind))

    def bytes(self, slots: int) -> int:
        """Everything: the caches of target and drafter with so many slots, and what a step needs besides."""
        return self.caches(slots) + self.workspace(slots)

    def by_device(self, slots: int) -> dict[torch.device, int]:
        """`bytes` by device, since drafters may have devices of their own."""
        taken = {self.target.device: self.bytes(slots)}
        for part in self.drafter.parts:
            device = part.device or self.target.device
            size = part.state_bytes(1, slots) + self._draft_workspace(part, slots)
            taken[self.target.device] -= size
            taken[device] = taken.get(device, 0) + size
        return taken

    def caches(self, slots: int) -> int:
        """Bytes of the caches of target and drafter."""
        # Bytes that some targets keep for each row besides its slots, such as recurrent states.
        of_rows = self.target.cache_bytes(self.max_batch_size, 0) - self.target.cache_bytes(1, 0)
        return self.target.cache_bytes(1, slots) + of_rows + self.drafter.state_bytes(1, slots)

    def workspace(self, slots: int) -> int:
        """Bytes that a step needs besides the caches: the largest forward; the logits of all nodes, in the target's
        dtype and twice in float32; the features, by layer and side by side, of all nodes, a part of a prompt, or a
        pause in drafting, whichever is most; and the workspaces of drafters."""
        target, rows, size = self.target, self.max_batch_size, self.target.dtype.itemsize
        longest = min(slots, self._most_row_slots)
        forward = max(
            target.forward_bytes(rows, self.nodes, min(longest, slots // rows + 1)),
            target.forward_bytes(1, min(self.prefill_tokens, longest), longest),
        )
        logits = rows * self.nodes * target.vocab_size * (size + 2 * torch.float32.itemsize)
        tokens = max(self.prefill_tokens, rows * self.nodes)
        if self.automatic:
            tokens = max(tokens, rows * min(MOST_KEPT, target.max_context))
        hidden_states = 2 * tokens * len(self.drafter.target_layers) * target.hidden_size * size
        return forward + logits + hidden_states + sum(self._draft_workspace(part, slots) for part in self.drafter.parts)

    def _draft_workspace(self, part: Drafter, slots: int) -> int:
        """Bytes that a drafter keeps for its calls of `propose` and `observe`."""
        observed = max(self.prefill_tokens, self.max_batch_size * self.nodes, AT_ONCE if self.automatic else 0)
        reached = max(min(slots, self._most_row_slots), observed)
        return part.workspace_bytes(1, observed, reached)

    def of_one(self, slots: int) -> dict[str, int]:
        """Memory of one request alone with so many slots: the weights of target and drafter, their caches, and the
        workspace of a step."""
        alone = replace(self, max_batch_size=1)
        weights = self.target.weight_bytes() + self.drafter.weight_bytes()
        return {"weights": weights, "caches": alone.caches(slots), "workspace": alone.workspace(slots)}

    def slots(self, prefix_tokens: int, limit: int | None) -> int:
        """Slots for all rows at their longest and for remembered prefixes, or as many as the memory allows.

        Args:
            limit: Most bytes to take; None is `SHARE` of the memory that is free on each device.
        """
        wanted = self.max_batch_size * self._most_row_slots + prefix_tokens
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
