"""Protocols through which engine and drafters use a target, and the options of its backends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import DraftHost, DraftNetwork
from blockdraft.nn.executor import TargetOutput as TargetOutput
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.packed import Kernels
from blockdraft.nn.torch_runner import TorchDraftRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


log = logging.getLogger(__name__)


class NotCovered(ValueError):
    """A backend cannot run a model; the message completes "it cannot run the model because ..."."""


@dataclass(frozen=True)
class TargetText:
    """Tokenizer and limits of a target, without its weights; see `Target`."""

    path: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    max_context: int
    eos_token_ids: frozenset[int]
    tokenizer_reason: str | None = None


class Target(Protocol):
    """The language model whose output must not change.

    A backend's class may inherit from this one and implement what has no default here.

    Attributes:
        backend: Name of the backend, such as "native" or "hf".
        architecture: The model's configuration as values of JSON, without the dtype.
        max_context: Maximum number of tokens of a sequence, prompt included.
        path: Where the target was loaded from.
        backend_reason: Why another backend than the first choice runs it, if "auto" chose.
        chosen_for: Property of this machine that makes the backend the first choice; None if it always is.
        tokenizer: None if the folder has none; then prompts are token ids.
        tokenizer_reason: Why there is no tokenizer, unless the folder has none.
        eos_token_ids: Tokens that end a response.
        model: The model of transformers that runs it, if any.
        has_trees: Whether `forward` takes trees, or only chains.
        can_truncate: Whether rows can be cut and copied at any token, or only as a whole.
        keeps_checkpoints: Whether rows that cannot be cut can be copied where `SequenceState.reusable` says.
        is_compiled: Whether forward passes are compiled for this CPU, or captured as CUDA graphs.
        draft_head: Output projection for draft networks without one of their own; None is the target's.
        kernels: Compiled matrix products of its weights, for draft networks with such weights.
    """

    backend: str
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int
    architecture: dict[str, Any]
    path: Path | None = None
    backend_reason: str | None = None
    chosen_for: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    tokenizer_reason: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    model: PreTrainedModel | None = None
    has_trees: bool = True
    can_truncate: bool = True
    keeps_checkpoints: bool = False
    is_compiled: bool = False
    draft_head: ReducedHead | None = None
    kernels: Kernels | None = None

    def __deepcopy__(self, memo: object) -> Target:
        """Return the target itself, since its weights never change and sequences live in caches."""
        return self

    @property
    def running(self) -> str:
        """How the target runs, in words: backend, compiled, exact, quantized weights."""
        return self.backend

    @property
    def source_fingerprint(self) -> str | None:
        """Fingerprint that drafters of this target carry, of the weights before quantization and of an adapter."""
        return None

    @property
    def best_block_size(self) -> int | None:
        """Largest block that costs little more to score than one token, if known."""
        return None

    @property
    def shape(self) -> Mapping[str, Any]:
        """Sizes for a new drafter, as far as the model has them.

        They are intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta and
        rope_scaling (as in `DraftConfig`).
        """
        return {}

    @cached_property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock that a caller holds while it computes, so that engines and threads can share the target."""
        # Two threads that ask at the same time get the same lock.
        return cast("AbstractContextManager[Any]", self.__dict__.setdefault("lock", RLock()))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every weight by its name in the checkpoint, for any backend, without a tied head."""

    def weights_in(self, part: str) -> dict[str, Tensor]:
        """Return the weights whose names contain `part`. Other weights are not dequantized."""
        return {name: weight for name, weight in self.named_weights() if part in name}

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of `batch` rows with `capacity` slots each, nodes included."""

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Return the bytes of such a cache."""

    def weight_bytes(self) -> int:
        """Return the bytes of the weights."""
        return sum(weight.nbytes for _, weight in self.named_weights())

    def row_slots(self, tokens: int) -> int:
        """Return the slots of a row for up to `tokens` tokens and nodes."""
        return tokens

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Return the working memory of a forward pass on rows of `slots` slots, without its outputs."""

    def step_context(self) -> AbstractContextManager[Any]:
        """Return the context in which steps run fastest beside a compiled draft network. It can be entered again."""
        return nullcontext()

    def compile_at_once(self) -> None:
        """Compile and capture everything before it runs, instead of in the background, where it would be."""
        return

    def draft_host(self, head: Callable[[Tensor], Tensor] | None = None) -> DraftHost:
        """Return what a draft network borrows from this target.

        Args:
            head: The network's own output projection; None is `draft_head`, or else the target's.
        """
        return DraftHost(dtype=self.dtype, embed=self.embed, target_head=self.head, own_head=head or self.draft_head)

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        """Return the runner of a draft network for this target, a `DraftRunner`.

        It uses torch's operations where the backend has none of its own, or none that knows all that the network's
        description states.

        Args:
            network: Draft network of any device and dtype; it is moved to those of the target.
            head: As in `draft_host`.
            owned: Whether nobody else uses the network. A runner that packs or quantizes its weights then frees them.
        """
        network.to(device=self.device, dtype=self.dtype)
        return TorchDraftRunner(network, self.draft_host(head))

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        """Score a tree of nodes after each row's committed tokens.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64 on the CPU, as in `Proposal`. A node attends to the committed tokens, its ancestors
                and itself.
            cache: Cache of the B rows. It holds the nodes afterwards; `cache.commit` selects those that stay.
            target_layers: Target layers whose hidden states are returned, from 0; `num_layers` is the input of `head`.
            logits_at: `[B]`, the single node of each row whose logits are returned; None is all nodes.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows of the embedding, `[...]` to `[..., H]`, without the scale that some families apply."""

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the output projection, `[..., H]` to `[..., V]`, without soft-caps."""


def without_tokenizer(target: Target | TargetText) -> str:
    """Return the beginning of a message about a target without a tokenizer."""
    why = target.tokenizer_reason
    return "The target has no tokenizer" if why is None else f"The target has no tokenizer ({why})"


def set_max_context(target: Target, tokens: int) -> None:
    """Set the maximum number of tokens of a sequence. Warn if it is larger than the target's."""
    if tokens > target.max_context:
        log.warning(
            "The context is set to %d tokens and the model's is %d; output beyond that may be poor.",
            tokens,
            target.max_context,
        )
    target.max_context = tokens


def with_draft_vocab(target: Target, kept: Tensor) -> Target:
    """Return a copy of a target whose drafters use part of its output projection (FR-Spec, arXiv 2502.14856).

    It applies to drafters without a projection of their own. Copy and target share weights and lock.

    Args:
        kept: `[Vd]` int64, the distinct tokens of the draft vocabulary.

    Raises:
        UsageError: As `embedding_and_head`.
    """
    units = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    _check_no_bias(target, units)
    # All rows of a large vocabulary would take gigabytes.
    weight = torch.cat([target.head(some)[:, kept.to(some.device)] for some in units.split(64)]).T.contiguous()
    target.lock  # noqa: B018  the copy shares it once it is there
    limited = copy(target)
    limited.draft_head = ReducedHead(weight, kept.to(weight.device), target.vocab_size)
    return limited


def embedding_and_head(target: Target) -> tuple[Tensor, Tensor]:
    """Return embedding and output projection of a target, `[V, H]` each, for drafters that copy them.

    Raises:
        UsageError: The projection has a bias, which no format of drafters holds.
    """
    units = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    _check_no_bias(target, units)
    return target.embed(torch.arange(target.vocab_size, device=target.device)), target.head(units).T


def _check_no_bias(target: Target, units: Tensor) -> None:
    if target.head(torch.zeros_like(units[:1])).any():
        raise UsageError(f"The output projection of {target.path or 'the target'} has a bias, which no format holds.")
