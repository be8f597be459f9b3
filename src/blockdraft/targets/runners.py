"""How the networks of drafters run beside a target, in its way of computing."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from blockdraft.nn.cache import KVCache


class DraftRunner(Protocol):
    """Runs a draft network that reads the target's features, in the target's way of computing.

    Attributes:
        compile_reason: Why it is not compiled, where it might have been; else None.
    """

    compile_reason: str | None

    def new_state(self, batch: int, capacity: int) -> Any:
        """As `Drafter.new_state`."""

    def state_bytes(self, batch: int, capacity: int) -> int:
        """As `Drafter.state_bytes`."""

    def weight_bytes(self) -> int:
        """Memory of weights that it keeps beside the network's own."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Memory that is kept from call to call, beside results: for so many rows, tokens of each, and slots that a
        row reaches, these tokens' included. 0 of torch's operations, which give theirs back."""

    def observe(self, state: Any, features: Tensor) -> None:
        """Write what the network keeps of tokens `[B, N, m * H]` behind each row's own, for `state.commit` to keep."""

    def __call__(self, state: Any, block: Tensor, window: int | None = None) -> Tensor:
        """One pass over blocks of embeddings `[B, N, H]`, in the dtype of the target: `[B, N, H]` after the final norm.
        It leaves no trace."""

    def guesses(self, state: Any, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """One pass over blocks of tokens, with the head behind it.

        Args:
            tokens: `[B, N]` int64, `[anchor, mask, mask, ...]`.
            first: Slot of each block from which on logits are wanted.
            window: Committed tokens of each row that are looked at, the last ones; None is all of them.

        Returns:
            Hidden states `[B, N - first, H]` and logits `[B, N - first, V]`.
        """


class DraftRows(Protocol):
    """Rows of a cycle, by which a network guesses a token at a time; see `nn.rows`. The first call has the anchors.

    Attributes:
        room: How many more there may be.
    """

    @property
    def room(self) -> int: ...

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits `[B, N, Vd]` of what follows one more row for each of the tokens.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64, the places of the rows that these follow in the call before, whose ancestors they
                see; None is its only one, or the text.
        """


class RowRunner(Protocol):
    """Runs a network that guesses a token at a time, in the target's way of computing.

    What it keeps of a text lies in the slots of its tokens: slot s has the keys and values of the row of token s, which
    takes the target's feature at s - 1, and the feature at s, which the row of the next token will take. Slot 0 has no
    feature before it and is seen by nobody.

    Attributes:
        compile_reason: As of a `DraftRunner`.
    """

    compile_reason: str | None

    def state_bytes(self, batch: int, capacity: int) -> int:
        """As `Drafter.state_bytes`."""

    def weight_bytes(self) -> int:
        """Memory of weights that it keeps beside the network's own."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """As of a `DraftRunner`."""

    def rows_beside(self, block_size: int, width: int) -> int:
        """Slots behind a text that the rows of a cycle take, with so many of them on each level."""

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        """Write what is kept of tokens `[B, N]`, with the tapped outputs `[B, N, m * H]`, behind each row's own, for
        `state.commit` to keep."""

    def rows(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> DraftRows:
        """The rows of a cycle.

        Args:
            block_size: Tokens of a path, anchor included.
            width: Most rows of a level behind the anchor.
            window: Committed tokens that are seen, the last ones; None is all.
        """


class HeadRunner(Protocol):
    """Runs Medusa's heads, in the target's way of computing.

    Attributes:
        compile_reason: As of a `DraftRunner`.
    """

    compile_reason: str | None

    def weight_bytes(self) -> int:
        """Memory of weights that it keeps beside the network's own."""

    def __call__(self, hidden: Tensor, count: int) -> Tensor:
        """Logits `[B, count, V]` of the first heads, of the target's hidden states `[B, H]`."""
