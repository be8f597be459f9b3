"""Protocol of the runners of draft networks, which is the same on all backends.

What a state holds depends on the entries that the network reads (`DraftDescription`):

- Tokens: keys and values of committed tokens, made of the target's hidden states.
- Pairs: a KV slot for each token x[s] of a sequence. Slot s holds the keys and values of its entry, which has the
  hidden state at s - 1 and predicts x[s + 1]; and the target's fused hidden state at s, for the entry of the next
  token. Slot 0 has no hidden state before it, and no other node attends to it.
- None, but heads: the target's last hidden state at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache, StoreShape

WIDTH = 10  # nodes per level that a tree is continued from, and children of each


class DraftNodes(Protocol):
    """Nodes of one draft: the entries of its tokens, added level by level. The first call adds the anchors.

    Attributes:
        room: Number of further nodes per sequence that can be added.
    """

    @property
    def room(self) -> int: ...

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Add a node for each token, and return the logits `[B, N, Vd]` of the tokens that follow.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64, indices of the nodes' parents among those of the previous call. A node attends to
                its ancestors. None is the only node of that call, or no parent in the first call.
        """


class DraftRunner(Protocol):
    """Runs a draft network on the target's backend. Methods not described here are as in `Drafter`.

    Attributes:
        compile_reason: Reason why a network that could have been compiled is not; else None.
        bits: As of `Drafter`.
        shapes: What a state keeps of each token.
        device: Where it is kept.
    """

    shapes: tuple[StoreShape, ...] = ()
    device: torch.device | None = None

    compile_reason: str | None = None
    bits: int | None = None

    @property
    def grown_vocabulary(self) -> Tensor | None:
        """Ids of the tokens that logits are about, `[Vd]` int64; None for the network's own, `kept`.

        Calls of `observe` may change them.
        """
        return None

    def new_state(self, batch: int, capacity: int) -> Any:
        return KVCache(batch, capacity, self.shapes, self.device)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * sum(shape.token_bytes for shape in self.shapes)

    def weight_bytes(self) -> int:
        """Return the bytes of weights besides the network's own."""
        return 0

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0  # torch's operations free theirs

    def slots_beside(self, block_size: int, width: int) -> int:
        """Return the KV slots behind a sequence that a draft of at most `width` nodes per level takes."""
        return 0  # the nodes of a draft are in a copy

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor) -> None:
        """Write the KV slots of tokens `[B, N]` behind each sequence's committed ones, for `state.commit` to keep.

        Args:
            hidden_states: Hidden states of the target layers at these tokens, `[B, N, m * H]`.
        """

    def draft_tokens(self, state: Any, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Run one pass over blocks of tokens, or over their heads, and the output head. The state does not change.

        Args:
            tokens: `[B, N]` int64, `[anchor, mask, mask, ...]`. Of a network of heads only the shape counts.
            first: First position of a block whose logits are needed; 1 for heads.
            window: Number of each sequence's last committed tokens that attention reads; None is all.

        Returns:
            Hidden states `[B, N - first, H]` and logits `[B, N - first, V]`.
        """

    def chain(
        self,
        state: Any,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Draft a chain of the most probable tokens in one call. Return None if this runner goes from node to node.

        Args:
            anchor: `[B]` int64.
            draft_tokens: Draft tokens per sequence.
            window: As in `nodes`.
            seconds, calibration: `step_seconds` and `calibration` of a `Plan`: a chain ends as a `GrowingChain`.

        Returns:
            Tokens `[B, n]`, anchors first, and with `seconds` each sequence's expected number of accepted draft tokens,
            `[B]`.
        """
        return None

    def nodes(self, state: Any, block_size: int, width: int, window: int | None = None) -> DraftNodes:
        """Begin the nodes of a draft.

        Args:
            block_size: Maximum number of tokens on a path, anchor included.
            width: Maximum number of nodes per level behind the anchor.
            window: Number of last committed tokens that are visible; None is all.
        """
