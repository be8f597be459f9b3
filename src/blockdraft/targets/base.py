"""What the engine and the drafters know of a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockdraft.cpu.compiled import CompiledDecoder
from blockdraft.cuda.graphs import CapturedDecoder
from blockdraft.errors import UsageError


class Cache(Protocol):
    """The target's memory of committed tokens. It owns rollback: what is not committed is gone."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of the last forward, for each row in order, and drop its other nodes."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of row i, at most as many as it has."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""

    def join(self, other: Any, capacity: int) -> None:
        """Take over the rows of another cache of the same target, behind this one's own.

        Args:
            capacity: Slots that each row needs from now on.
        """

    def prefix(self, row: int, length: int) -> Any:
        """A cache of one row that holds a copy of this row's first `length` committed tokens."""


@dataclass(frozen=True)
class TargetOutput:
    """Attributes:
    logits: `[B, N, V]`, or `[B, 1, V]` where only one node's logits were asked for.
    features: `[B, N, m * H]`, the outputs of the tapped layers side by side; None without taps.
    best: Argmax of the logits, int64, the lowest of equals; -1 where a logit is NaN or the largest is infinite.
        None where the backend has not computed it.
    """

    logits: Tensor
    features: Tensor | None
    best: Tensor | None = None


@dataclass(frozen=True)
class TargetText:
    """What is known of a target without its weights; see `Target`."""

    path: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    max_context: int
    eos_token_ids: frozenset[int]


class Target(Protocol):
    """The language model whose output must not change.

    Attributes:
        path: Where it was loaded from.
        backend: How it is run, "native" or "hf".
        running: How it is run, in words for people: the backend, and whether compiled or with int8 weights.
        backend_reason: Why it is not run natively, where that was not asked for; else None.
        compiled: Its forward compiled for this machine, or None; a drafter's is compiled where the target's is.
        captured: Its forward captured as CUDA graphs, or None; likewise.
        tokenizer: None where the folder has none; then prompts are token ids.
        max_context: Tokens that a row may hold, prompt and answer together.
        eos_token_ids: Tokens that end an answer.
        shape: What a new drafter may take over from it, where the model has it: intermediate_size, num_attention_heads,
            num_key_value_heads, head_dim, rms_norm_eps, rope_theta, rope_scaling (as in `DraftConfig`).
        architecture: What its configuration says, as JSON can spell it, without the dtype.
    """

    path: Path | None
    backend: str
    backend_reason: str | None
    dtype: torch.dtype
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    architecture: dict[str, Any]

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every weight, by its name in the checkpoint, whichever the backend; a tied head is not named again."""

    @property
    def running(self) -> str: ...

    @property
    def compiled(self) -> CompiledDecoder | None: ...

    @property
    def captured(self) -> CapturedDecoder | None: ...

    @property
    def shape(self) -> Mapping[str, Any]: ...

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of `batch` rows with `capacity` slots each, nodes included."""

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Memory that such a cache takes, in bytes."""

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Cache,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        """Score a tree of nodes behind each row's committed tokens.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64 on the CPU, as in `Proposal`; node i attends to the committed tokens, its ancestors,
                itself.
            cache: Holds the nodes afterwards; `cache.commit` decides which stay.
            taps: Layers whose output is wanted, 0-based; `num_layers` stands for the input of `head`.
            logits_at: `[B]`, the one node of each row whose logits are wanted; None wants all.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Raw rows of the embedding table, `[..., H]`, without the scale that some families apply."""

    def head(self, hidden: Tensor) -> Tensor:
        """The output projection alone, `[..., H]` to `[..., V]`, without soft-caps."""


def embedding_and_head(target: Target) -> tuple[Tensor, Tensor]:
    """The weights that drafters borrow, each `[V, H]`: the embedding table and the output projection. Raises ValueError
    where the projection has a bias, which is no part of it."""
    rows = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    if target.head(torch.zeros_like(rows[:1])).any():
        raise UsageError(f"The output projection of {target.path or 'the target'} has a bias, which no format holds.")
    return target.embed(torch.arange(target.vocab_size, device=target.device)), target.head(rows).T
