"""Protocol between the engine and a drafter, and the entry that describes a kind of drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from blockdraft.decode.proposal import Plan, Proposal
from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, check_fits, read_drafter
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.nn.layers import ReducedHead
from blockdraft.plugins import kind_modules
from blockdraft.targets import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of the draft tokens that are final after the fraction t of the draft passes.
NOISE_SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cosine": lambda t: 1 - math.cos(math.pi / 2 * t),
}

NOISE_SCHEDULE = "cosine"  # unless another one is chosen


class Observer(Protocol):
    """Observes the committed tokens of sequences, never rejected ones, and the target's hidden states at them.

    Attributes:
        target_layers: Target layers whose hidden states `observe` needs, 0-based; empty for one that reads tokens only.
    """

    target_layers: tuple[int, ...]

    def new_state(self, batch: int, capacity: int) -> Any:
        """Return an empty `SequenceState` for `batch` sequences of up to `capacity` tokens each."""

    def state_bytes(self, batch: int, capacity: int) -> int:
        """Return the bytes of such a state."""

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        """Add the tokens committed since the last call to the state, the newest anchor excluded.

        Args:
            tokens: `[B, N]` int64, shorter sequences padded at their end.
            hidden_states: `[B, N, m * H]`, hidden states of the m target layers at these tokens; None without such
                layers.
            lengths: Number of valid tokens of each sequence.
        """


def select_layers(hidden_states: Tensor | None, given: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """Return the hidden states `[..., m * H]` of some target layers.

    Args:
        hidden_states: Hidden states `[..., n * H]` of the layers `given`.
        wanted: Layers among them, in any order; without any, None is returned.
    """
    if hidden_states is None or not wanted:
        return None
    if tuple(wanted) == tuple(given):
        return hidden_states
    by_layer = hidden_states.chunk(len(given), dim=-1)
    return torch.cat([by_layer[given.index(layer)] for layer in wanted], dim=-1)


class Drafter(Observer, Protocol):
    """Proposes the next tokens of a target.

    Attributes:
        path: Folder or file that it was loaded from; None for a drafter without files.
        block_size: Maximum number of tokens on a path of a proposal, anchor included.
        chooses_tree_size: Whether it chooses how far to draft from `plan.step_seconds`.
        chooses_length: Whether it chooses the length of a chain best itself, because it was trained to predict how far
            a chain is accepted, or because it saves time by ending early. If False, "auto" chooses the length from
            what was accepted so far.
        runs_network: Whether a draft takes a forward pass of a network.
        has_target_head: Whether it scores tokens by the target's output projection, or by the rows of it in
            `target.draft_head`.
        draft_vocab: Number of these rows; None is all.
        compile_reason: Reason why its network is not compiled for a CPU; None if it is, or without a network.
        bits: Bits to which its weights are quantized next to its target; None if they are not.
        slots_beside: Maximum number of KV slots behind a sequence that a draft uses.
    """

    path: Path | None
    block_size: int
    chooses_tree_size: bool = False
    chooses_length: bool = False
    runs_network: bool = True
    has_target_head: bool = False
    draft_vocab: int | None = None

    def __deepcopy__(self, memo: object) -> Drafter:
        """Return the drafter itself: its weights never change, and sequences are in states."""
        return self

    @property
    def kind(self) -> str:
        """Name of its kind: that of its module in this package or of its entry point, else the name of its module."""
        module = type(self).__module__
        kinds = (name for name, known in kind_modules().items() if f"{module}.".startswith(f"{known}."))
        return next(kinds, module.rpartition(".")[2])

    @property
    def compile_reason(self) -> str | None:
        return None

    @property
    def bits(self) -> int | None:
        return None

    @property
    def slots_beside(self) -> int:
        return 0

    @property
    def parts(self) -> Sequence[Drafter]:
        """Members of a hybrid drafter; for any other drafter, itself."""
        return (self,)

    def weight_bytes(self) -> int:
        """Return the bytes of its own weights, without those borrowed from the target."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Return the bytes of working memory kept between calls, without results.

        Args:
            batch: Sequences of a call.
            nodes: Tokens per sequence.
            slots: KV slots that a sequence uses, those of these tokens included.
        """
        return 0

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        """Propose the tokens behind the anchors.

        Args:
            anchor: `[B]` int64, each sequence's last committed token.
            plan: How far to draft; `plan.block_size` is at most `self.block_size`. Trees have acceptance probabilities
                when `plan.step_seconds` is set. Without them, a hybrid drafter assumes 0.5 for every draft token.
        """

    def remember(self, state: Any, scope: str, tokens: Sequence[int]) -> None:
        """Keep a finished output for later sequences of the same `SamplingParams.lookup_scope`, if it can be of use."""
        return


@dataclass(frozen=True)
class DraftCost:
    """Cost of running drafters of a kind, for projections of models that are not loaded.

    Attributes:
        layers: Layers of the network, each as wide as the target's.
        target_layers: Number of target layers that are fused into its input.
        block_size: Tokens of a block, anchor included, if the drafter's maker states none; also the maximum to try.
        serial: Whether each draft token takes a pass.
        head_vocabulary: Tokens of an output head of its own, in bfloat16; None if it runs the target's head.
    """

    layers: int = 5
    target_layers: int = 5
    block_size: int = 8
    serial: bool = False
    head_vocabulary: int | None = None


@dataclass(frozen=True)
class DrafterSpec:
    """Kind of drafter: the value of `DRAFTER` in a file of this package, or in the `drafter.py` of a folder.

    Attributes:
        load: Function that loads a drafter from a folder, or None without a folder, for a target. For hybrid drafters,
            the first argument is the list of members.
        architectures: Architecture names in config.json that this kind loads.
        by_name: Whether it can be loaded by its name in this package, without a folder.
        claims: Whether a parsed config.json belongs to this kind, whatever architecture it names. It is asked before
            `architectures`.
        network: Class of the network that training makes; None without a network.
        layouts: Names of the layouts that can hold it. Training writes the first.
        drafter: Class that drafts with a network for a target, called with both; None without a network.
        cost: Cost of running published drafters of the kind.
        inspect: Function that returns the `Report` of `blockdraft inspect` on a folder and its parsed config.json, for
            kinds that claim folders which no layout describes.
        in_target: Whether a target's folder or file holds a drafter of this kind that runs compiled for this target.
    """

    load: Callable[[Any, Target], Drafter]
    architectures: Sequence[str] = ()
    by_name: bool = False
    claims: Callable[[Mapping[str, Any]], bool] = lambda raw: False
    network: type[nn.Module] | None = None
    layouts: tuple[str, ...] = ()
    drafter: Callable[[Any, Target], Drafter] | None = None
    cost: DraftCost = DraftCost()
    inspect: Callable[[Path, Mapping[str, Any]], Any] | None = None
    in_target: Callable[[Target], bool] = lambda target: False


def slots_behind(drafter: Drafter, nodes: int) -> int:
    """Return the KV slots that each sequence needs behind its tokens, for the nodes of a step and for its drafters."""
    return max(nodes, *(part.slots_beside for part in drafter.parts))


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, target: Target, own: Collection[int] = ()
) -> None:
    """Raise a UsageError unless the draft model and the target give the same ids to the same tokens.

    Args:
        tokenizer, vocab_size: Tokenizer and vocabulary size of the draft model.
        own: Token ids of the draft model that the target may lack.
    """
    if tokenizer is None or target.tokenizer is None:
        if vocab_size - len(own) > target.vocab_size or vocab_size < target.vocab_size:
            raise UsageError(
                f"The draft model's vocabulary has {vocab_size} tokens and the target's {target.vocab_size}; "
                f"use a draft model with the target's tokens."
            )
        return
    ours, theirs = tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = {token for token, id in ours.items() ^ theirs.items() if token in theirs or id not in own}
    if differing:
        token = min(differing)
        raise UsageError(
            f"The token {token!r} has the id {ours.get(token)} in the draft model ({len(ours)} tokens) and "
            f"{theirs.get(token)} in the target ({len(theirs)} tokens); use a draft model with the target's tokenizer."
        )


N = TypeVar("N", bound=DraftNetwork)


def read_network(path: Path, target: Target, kind: Callable[[Any], N]) -> N:
    """Load the network in a drafter's folder, in the target's dtype and on its device.

    Args:
        kind: Function that makes the network from its configuration.

    Raises:
        ValueError: As `read_fitting`.
    """
    return filled_network(read_fitting(path, target), kind).to(target.device, target.dtype)


def read_fitting(path: Path, target: Target) -> Checkpoint:
    """Read a drafter's folder or GGUF file. Raise a ValueError if it is broken or does not fit this target."""
    checkpoint = read_drafter(path, target.tokenizer.get_vocab() if target.tokenizer else None, target.num_layers)
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(checkpoint.config, **sizes)
    if checkpoint.borrowed is not None:
        _check_borrowed(path, checkpoint.borrowed, target)
    return checkpoint


def _check_borrowed(path: Path, borrowed: Borrowed, target: Target) -> None:
    """Raise a UsageError if a checkpoint's copies of the target's weights come from another model.

    Rows of the embedding and columns of the head are sampled. A head with a draft vocabulary is not compared, because
    it may have been trained."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    if borrowed.embedding is not None:
        rows = torch.linspace(0, target.vocab_size - 1, 256).long()
        pairs["embed_tokens.weight"] = borrowed.embedding[rows], target.embed(rows.to(target.device))
    if borrowed.head is not None and borrowed.kept is None:
        units = torch.eye(8, target.hidden_size, dtype=target.dtype, device=target.device)
        pairs["lm_head.weight"] = borrowed.head[:, :8].T, target.head(units)
    for name, (ours, theirs) in pairs.items():
        if not torch.allclose(ours.float(), theirs.cpu().float(), rtol=0.02, atol=1e-3):  # dtypes may differ
            raise UsageError(
                f"{name} of {path} differs from the target's; use the target that the drafter was exported with."
            )


def filled_network(checkpoint: Checkpoint, kind: Callable[[Any], N]) -> N:
    """Return the network of a checkpoint, which takes over its tensors. `kind` as in `read_network`."""
    with torch.device("meta"):
        network = kind(checkpoint.config)
    network.load_state_dict(checkpoint.tensors, assign=True)
    network.qat_bits = checkpoint.trained.qat_bits
    return network


class RunnerDrafter(Drafter):
    """Base of drafters whose network runs on the target's backend."""

    network: DraftNetwork
    target: Target
    runner: Any  # a `DraftRunner`
    reduced_head: ReducedHead | None = None

    @property
    def compile_reason(self) -> str | None:
        return cast("str | None", self.runner.compile_reason)

    @property
    def bits(self) -> int | None:
        return cast("int | None", self.runner.bits)

    def new_state(self, batch: int, capacity: int) -> Any:
        return self.runner.new_state(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cast(int, self.runner.state_bytes(batch, capacity))

    def weight_bytes(self) -> int:
        storages = [tensor.untyped_storage() for tensor in (*self.network.parameters(), *self.network.buffers())]
        own = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        head = self.reduced_head or self.target.draft_head
        return own + (head.nbytes if head else 0) + cast(int, self.runner.weight_bytes())

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return cast(int, self.runner.workspace_bytes(batch, nodes, slots))
