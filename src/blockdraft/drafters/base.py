"""Protocol between the engine and a drafter, and the entry that registers a kind of drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from blockdraft.decode.proposal import Plan, Proposal
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, check_fits, read_drafter
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.targets import Target
from blockdraft.targets.base import Rows

# Share of the guesses that are final after the fraction t of the draft passes.
NOISE_SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cosine": lambda t: 1 - math.cos(math.pi / 2 * t),
}

DIFFUSION_STEPS, NOISE_SCHEDULE = 1, "cosine"


def check_refinement(diffusion_steps: int, noise_schedule: str) -> None:
    """Raise a UsageError for a number of draft passes below 1 or an unknown schedule."""
    if diffusion_steps < 1:
        raise UsageError(f"diffusion_steps is {diffusion_steps}; it must be at least 1.")
    if noise_schedule not in NOISE_SCHEDULES:
        raise UsageError(f"noise_schedule is {noise_schedule!r}; it must be one of {sorted(NOISE_SCHEDULES)}.")


# A drafter's cache. It has the same rows as the target's cache, but slots of its own.
State: TypeAlias = Rows


class Drafter(Protocol):
    """Guesses the next tokens of a target. It sees committed tokens only, never rejected ones.

    Attributes:
        target_layers: Target layers whose outputs `observe` needs, 0-based; empty for a drafter that reads tokens only.
        path: Folder or file that it was loaded from; None for a drafter without files.
        block_size: Most tokens of a path through a draft, anchor included.
        knows_probabilities: Whether it chooses how far to draft from `plan.cycle_seconds`.
        knows_lengths: Whether its own choice of a chain's length is the best one, because it was trained to predict
            how far a chain is accepted, or because it saves time by ending early. If False, "auto" chooses the length
            from what was accepted so far.
        has_pass: Whether a draft takes a pass of a network.
        has_target_head: Whether it scores tokens by the target's output projection, or the rows of it in
            `target.draft_head`.
        draft_vocab: Number of these rows; None is all.
        device: Device that it drafts on; None is the target's device.
        compile_reason: Reason why its network is not compiled for a CPU; None where it is, or without a network.
        bits: Bits to which its weights are rounded beside its target; None where they are not.
        slots_beside: Most slots behind a row's text that a draft uses.
    """

    path: Path | None
    target_layers: tuple[int, ...]
    block_size: int
    knows_probabilities: bool = False
    knows_lengths: bool = False
    has_pass: bool = True
    has_target_head: bool = False
    draft_vocab: int | None = None

    def __deepcopy__(self, memo: object) -> Drafter:
        """The drafter itself, since its weights never change, and what it knows of texts is in states."""
        return self

    @property
    def kind(self) -> str:
        """Name of its kind: of the file or folder of this package that defines it."""
        return type(self).__module__.removeprefix(f"{__package__}.").partition(".")[0]

    @property
    def device(self) -> torch.device | None:
        return None

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
        """Drafters that a combination is made of; any other drafter is its own only part."""
        return (self,)

    def new_state(self, batch: int, capacity: int) -> Any:
        """Empty `State` for `batch` rows of up to `capacity` tokens each."""

    def state_bytes(self, batch: int, capacity: int) -> int:
        """Memory of such a state, in bytes."""

    def weight_bytes(self) -> int:
        """Memory of its own weights, in bytes; weights borrowed from the target do not count."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Working memory that is kept between calls, results excluded, in bytes.

        Args:
            batch: Rows of a call.
            nodes: Tokens of each row.
            slots: Slots that a row uses, those of these tokens included.
        """
        return 0

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        """Guess the tokens behind the anchors.

        Args:
            anchor: `[B]` int64, each row's last committed token.
            plan: How far to draft; `plan.block_size` is at most `self.block_size`. Trees come with their
                `acceptance_probs` when `plan.cycle_seconds` is set; where they have none, a combined drafter takes
                every guess to be accepted half of the time.
        """

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        """Add the tokens committed since the last call to the state, the newest anchor excluded.

        Args:
            tokens: `[B, N]` int64, shorter rows padded at their end.
            hidden_states: `[B, N, m * H]`, outputs of the m tapped layers at these tokens; None without taps.
            lengths: Valid tokens of each row.
        """


@dataclass(frozen=True)
class DraftCost:
    """What drafters of a kind cost to run, for projections of models that are not there.

    Attributes:
        layers: Layers of the network, each as wide as the target's.
        target_layers: Layers of the target that are fused into its input.
        block_size: Tokens of a block, anchor included, where a drafter's maker does not say; also the most to try.
        serial: Whether each guess takes a pass.
        head_vocabulary: Tokens of an output head of its own, in bfloat16; None runs the target's.
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
        load: Function that loads a drafter from a folder, or None without a folder, for a target. For a kind that
            `joins` others, the first argument is the list of these drafters.
        architectures: Architecture names in config.json that this kind loads.
        by_name: Whether it can be loaded without a folder, by the name of its file or folder in this package.
        claims: Whether a parsed config.json belongs to this kind, whatever architecture it names; asked before
            `architectures`.
        network: Class of its network, as training makes it; None without a network.
        layouts: Names of the layouts that can hold it; training writes the first.
        drafter: Class that drafts with a network for a target, called with both; None without a network.
        joins: Whether it is made of other drafters; such a kind has no name of its own.
        load_on: Function that loads it onto another device than the target's; None for a kind that reads the target's
            features or has no model.
        cost: What published drafters of the kind cost to run.
    """

    load: Callable[[Any, Target], Drafter]
    architectures: tuple[str, ...] = ()
    by_name: bool = False
    claims: Callable[[Mapping[str, Any]], bool] = lambda raw: False
    network: type[nn.Module] | None = None
    layouts: tuple[str, ...] = ()
    drafter: Callable[[Any, Target], Drafter] | None = None
    joins: bool = False
    load_on: Callable[[Path, Target, torch.device], Drafter] | None = None
    cost: DraftCost = DraftCost()


def slots_behind(drafter: Drafter, nodes: int) -> int:
    """Slots that each row needs behind its text, for the nodes of a cycle and for what its drafters write there."""
    return max(nodes, *(part.slots_beside for part in drafter.parts))


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, target: Target, own: Collection[int] = ()
) -> None:
    """Raise a UsageError unless the draft model and the target give the same ids to the same tokens.

    Args:
        tokenizer, vocab_size: Tokenizer and vocabulary size of the draft model.
        own: Token ids of the draft model that the target need not have.
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
    """Load the network of a drafter's folder, in the target's dtype and on its device.

    Args:
        kind: Function that makes the network from the configuration in the folder.

    Raises:
        ValueError: The folder cannot be read, or its drafter does not fit this target.
    """
    found = read_drafter(path, target.tokenizer.get_vocab() if target.tokenizer else None, target.num_layers)
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(found.config, **sizes)
    return filled_network(found, kind).to(target.device, target.dtype)


def filled_network(found: Checkpoint, kind: Callable[[Any], N]) -> N:
    """The network of a checkpoint, which takes its tensors.

    Args:
        kind: As in `read_network`.
    """
    with torch.device("meta"):
        network = kind(found.config)
    network.load_state_dict(found.tensors, assign=True)
    network.qat_bits = found.trained.qat_bits
    return network


@runtime_checkable
class NetworkDrafter(Drafter, Protocol):
    """Drafter that runs a draft network, in one or several passes per block.

    Attributes:
        network: Draft network, already on the target's device and in its dtype.
        config: Configuration of the network.
    """

    network: nn.Module
    config: DraftConfig

    def adapted(
        self, target: Target, diffusion_steps: int | None = None, noise_schedule: str | None = None
    ) -> NetworkDrafter:
        """Copy of this drafter for a target, with the given number and schedule of draft passes; None keeps the
        present value."""
