"""Protocol by which the engine uses a drafter, and the entry by which a kind of drafter is registered."""

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
from blockdraft.formats import check_fits, read_drafter
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import Target
from blockdraft.targets.base import Rows

# Share of the guesses that is settled after the fraction t of the draft passes.
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


# A drafter's memory of the rows of a batch: the same rows as the target's cache has, on slots of its own.
State: TypeAlias = Rows


class Drafter(Protocol):
    """Guesses the next tokens of a target. It is told what was committed, never what was rejected.

    Attributes:
        taps: Target layers whose outputs `observe` wants, 0-based; empty for a drafter that reads tokens only.
        path: Where it was loaded from; None for one that needs no files.
        block_size: Most tokens of a path, anchor included.
        knows_probabilities: Whether it heeds `plan.cycle_seconds`.
        knows_lengths: Whether it does so for chains in the best way, since it was trained to say how far they will be
            accepted, or saves time by ending early. Else "auto" sets their length by what was accepted so far.
        device: Where it drafts; None is the target's device.
        compile_reason: Why its network is not compiled for a CPU, in words; None where it is, or where there is none.
        slots_beside: Most slots behind a row's text that a draft takes.
    """

    path: Path | None
    taps: tuple[int, ...]
    block_size: int
    knows_probabilities: bool = False
    knows_lengths: bool = False

    @property
    def device(self) -> torch.device | None:
        return None

    @property
    def compile_reason(self) -> str | None:
        return None

    @property
    def slots_beside(self) -> int:
        return 0

    @property
    def parts(self) -> Sequence[Drafter]:
        """The drafters that it is made of; itself where it is no combination."""
        return (self,)

    def new_state(self, batch: int, capacity: int) -> Any:
        """An empty `State` of `batch` rows with up to `capacity` tokens each."""

    def state_bytes(self, batch: int, capacity: int) -> int:
        """Memory that such a state takes, in bytes."""

    def weight_bytes(self) -> int:
        """Memory that weights of its own take."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Memory that is kept from call to call, beside results, in bytes.

        Args:
            batch: Rows of a call.
            nodes: Tokens of each.
            slots: Slots that a row reaches, these tokens' included.
        """
        return 0

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        """Guess what follows the anchors.

        Args:
            anchor: `[B]` int64, each row's last committed token.
            plan: How far to draft; `plan.block_size` is at most `self.block_size`. A drafter can be combined with
                others if trees come with their `chances` where there is `plan.cycle_seconds`.
        """

    def observe(self, state: Any, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        """Learn what was committed since the last call; the newest anchor is not part of it.

        Args:
            tokens: `[B, N]` int64, filled up at the end of shorter rows.
            features: `[B, N, m * H]`, the tapped outputs at these tokens; None without taps.
            lengths: Valid tokens of each row.
        """


@dataclass(frozen=True)
class Entry:
    """A kind of drafter: the `DRAFTER` of a file of this package, or of `drafter.py` in a folder of it.

    Attributes:
        load: Makes the drafter of a folder for a target; called with None where there is no folder. One that `joins`
            others gets these.
        architectures: Names in config.json that it reads.
        by_name: Whether it needs no folder, or not always, and then goes by the name of its file or folder here.
        claims: Whether a parsed config.json is its own whatever name is there; asked before the names.
        network: Class of its network, as training makes it; None without one.
        layouts: Names of the layouts that hold it, the one that training writes first.
        drafter: Class that drafts with a network for a target, called with both; None without a network.
        joins: Whether it is made of other drafters; it has no name of its own.
        load_on: Loads it onto a device of its own; None for one that reads the target's features, or has no model.
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


def slots_behind(drafter: Drafter, nodes: int) -> int:
    """Slots that each row needs behind its text: for the nodes of a cycle, and for what drafters write there."""
    return max(nodes, *(part.slots_beside for part in drafter.parts))


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, target: Target, own: Collection[int] = ()
) -> None:
    """Raise a UsageError unless a draft model gives the same ids to the same tokens as the target.

    Args:
        tokenizer, vocab_size: The draft model's.
        own: Its tokens that the target need not have.
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
            f"The token {token!r} has the id {ours.get(token)} for the draft model, of {len(ours)} tokens, and "
            f"{theirs.get(token)} for the target, of {len(theirs)}; use a draft model with the target's tokenizer."
        )


N = TypeVar("N", bound=nn.Module)


def read_network(path: Path, target: Target, kind: Callable[[Any], N]) -> N:
    """The network of a folder, in the target's dtype and on its device.

    Args:
        kind: Makes it of the configuration that the folder holds.

    Raises:
        ValueError: The folder cannot be read, or its drafter is not for this target.
    """
    found = read_drafter(path, target.tokenizer.get_vocab() if target.tokenizer else None, target.num_layers)
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(found.config, **sizes)
    with torch.device("meta"):
        network = kind(found.config)
    network.load_state_dict(found.tensors, assign=True)
    return network.to(target.device, target.dtype)


@runtime_checkable
class NetworkDrafter(Drafter, Protocol):
    """A drafter that runs a draft network, in one or several passes a block.

    Attributes:
        network: On the target's device and in its dtype.
        config: The network's.
    """

    network: nn.Module
    config: DraftConfig

    def adapted(
        self, target: Target, diffusion_steps: int | None = None, noise_schedule: str | None = None
    ) -> NetworkDrafter:
        """The same drafter for this target and with these draft passes; None keeps the present ones. This one stays as
        it is."""
