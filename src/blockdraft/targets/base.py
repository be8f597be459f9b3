"""What the engine and the drafters know of a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockdraft.errors import UsageError
from blockdraft.types import DEFAULT_COMPILE, Compile, KVDtype, Quantize

R = TypeVar("R", covariant=True)


class Rows(Protocol):
    """Memory of the tokens of some rows: a target's cache, or what a drafter knows of the same rows.

    The memory is a line of slots, one a token. A row is a range of them and goes by its first slot. Who calls decides
    where rows lie; a row never moves.
    """

    def of(self, rows: Sequence[int]) -> Any:
        """These rows alone, in this order, over the same memory: what a forward or a draft pass takes."""

    def open(self, row: int, capacity: int) -> None:
        """Begin an empty row on the slots from `row` on, which no open row holds."""

    def close(self, row: int) -> None:
        """Forget a row."""

    def shrink(self, row: int, capacity: int) -> None:
        """Give up a row's slots beyond these, with the tokens on them."""

    def copy(self, source: int, row: int, length: int) -> None:
        """Make the first `length` tokens of one row the first of another, which is empty."""

    def wipe(self, row: int, whole: bool = False) -> None:
        """Let no number stay that a forward has left behind the row's committed tokens; with `whole` none at all, which
        is due before a row is closed whose numbers may not be finite."""


class Cache(Rows, Protocol):
    """The target's memory of committed tokens. It owns rollback: what is not committed is gone."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of the last forward, for each row in order, and drop its other nodes."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of row i, at most as many as it has."""


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
class LoadOptions:
    """How a backend is to load a model; see `load_target`.

    Attributes:
        best_threads: Measure which number of threads is fastest, and use it.
        revision, adapter: As in `load_target`.
        exact: A node's logits and features must not depend on what else is computed; the caller checks it.
        kv_dtype, round_drafters: As in `load_target`.
    """

    dtype: torch.dtype
    device: torch.device
    compile: Compile = DEFAULT_COMPILE
    quantize: Quantize | None = None
    best_threads: bool = False
    exact: bool = False
    revision: str | None = None
    adapter: str | Path | None = None
    kv_dtype: KVDtype | None = None
    round_drafters: bool = True


@dataclass(frozen=True)
class TargetText:
    """What is known of a target without its weights; see `Target`."""

    path: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    max_context: int
    eos_token_ids: frozenset[int]
    tokenizer_reason: str | None = None


class Runnable(Protocol[R]):
    """A draft network that brings its runner, whose class says what can be asked of it."""

    def to(self, *, device: torch.device = ..., dtype: torch.dtype = ...) -> Any:
        """As of `nn.Module`."""

    def runner(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> R:
        """Run it by torch's operations.

        Args:
            embed: Rows of the target's embedding table, tokens `[...]` to `[..., H]`.
            head: The output projection, hidden states `[..., H]` to logits.
            compile_reason: Why it is not compiled, where it might have been.
        """


class Target(Protocol):
    """The language model whose output must not change.

    Attributes:
        path: Where it was loaded from.
        backend: How it is run, "native" or "hf".
        running: How it is run, in words for people: the backend, and whether compiled, exact, or with int8 weights.
        backend_reason: Why it is not run natively, where that was not asked for; else None.
        lock: Held by whoever computes with it, so that several engines and threads can share it.
        best_block_size: Largest block whose scoring costs little more than that of one token, where that is known.
        has_trees: Whether `forward` takes trees; else chains only.
        can_truncate: Whether rows may be copied and cut at any of their tokens; else only as a whole.
        tokenizer: None where the folder has none; then prompts are token ids.
        tokenizer_reason: Why there is none, where more is known than that the folder has none.
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
    tokenizer_reason: str | None
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    architecture: dict[str, Any]
    has_trees: bool
    can_truncate: bool

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every weight, by its name in the checkpoint, whichever the backend; a tied head is not named again."""

    @property
    def running(self) -> str: ...

    @property
    def source_fingerprint(self) -> str | None:
        """Fingerprint of the weights before they were rounded, and of the adapter that was merged into them: what its
        drafters carry. None where it is not known."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    @property
    def best_block_size(self) -> int | None: ...

    @property
    def shape(self) -> Mapping[str, Any]: ...

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of `batch` rows with `capacity` slots each, nodes included."""

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Memory that such a cache takes, in bytes."""

    def weight_bytes(self) -> int:
        """Memory that the weights take."""

    def row_slots(self, tokens: int) -> int:
        """Slots that a row of up to so many tokens and nodes should have."""

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Memory that a forward takes meanwhile, its logits and features not counted, with so many slots a row."""

    def runner(self, network: Runnable[R], head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> R:
        """What runs a draft network beside this target: the network's own runner of torch's operations, or a faster one
        that this backend has.

        Args:
            network: Of any device and dtype.
            head: The network's output projection, hidden states `[..., H]` to logits; None is the target's.
            owned: Whether nobody else uses the network, so that layers may be exchanged for slow ones that take no
                memory of their own, and whose weights may be rounded. What is left is moved to the target's dtype.
        """

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


def without_tokenizer(target: Target | TargetText) -> str:
    """How a message begins that tells of a target without a tokenizer."""
    why = target.tokenizer_reason
    return "The target has no tokenizer" if why is None else f"The target has no tokenizer ({why})"


def embedding_and_head(target: Target) -> tuple[Tensor, Tensor]:
    """The weights that drafters borrow, each `[V, H]`: the embedding table and the output projection. Raises ValueError
    where the projection has a bias, which is no part of it."""
    rows = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    if target.head(torch.zeros_like(rows[:1])).any():
        raise UsageError(f"The output projection of {target.path or 'the target'} has a bias, which no format holds.")
    return target.embed(torch.arange(target.vocab_size, device=target.device)), target.head(rows).T
