"""What the trainer knows of a kind of drafter.

A variant is `train.py` of a drafter's folder, a subclass of `Variant` that is named `VARIANT` at the end of the file;
`blockdraft train <folder name>` finds it. It says how its network is made, and what that network thinks of the K tokens
behind each anchor when it sees what a drafter sees there: the features of the tokens strictly before the anchor (those
of the anchor itself do not exist yet when a drafter guesses), the anchor, and of later tokens at most those before the
one that it guesses.

    @settings
    class MyRecipe(Recipe):
        "Attributes:  (each field explained here, as in `Recipe`)"
        my_weight: Amount = 1.0

    class MyVariant(Variant[MyRecipe, MyNetwork, MyConfig]):
        recipe_class = MyRecipe

        def config(self, target): return MyConfig(...)
        def new_network(self, config, vocabulary): return MyNetwork(config)
        def hidden(self, network, target, features_BSF, rows): ...
        def factors(self): return {**super().factors(), "mine": self.recipe.my_weight}
        def losses(self, network, slots): return {**super().losses(network, slots), "mine": ...}

    VARIANT = MyVariant

A variant of the DFlash family needs less: see `drafters/dflash/train.py`.

`logits`, `losses`, `guesses` and `counts` see a chunk of blocks at a time. Modules of the network that `hidden` does
not call, such as a head on top of hidden states and logits, are called there. What `losses` computes is thrown away and
computed again in the backward pass, so it must not draw random numbers or change anything.

The parity test in `tests/drafters/test_parity.py` runs over every file here without being told: what
`load_drafter` reads back must guess what `guesses` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from blockdraft.data.documents import TokenData
from blockdraft.errors import Complaints, UsageError
from blockdraft.formats import read_drafter
from blockdraft.nn.draft_config import need
from blockdraft.plugins import DRAFTERS, part_names
from blockdraft.targets import Target
from blockdraft.training.batches import Rows
from blockdraft.training.objectives import Slots, default_gamma, find_objective
from blockdraft.training.recipe import Recipe


class NetworkConfig(Protocol):
    """What every drafter's configuration has.

    Attributes:
        taps: Target layers whose outputs the drafter reads, 0-based.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...


class Choice(NamedTuple):
    """What a field is settled to, and a few words why; None where that is the usual."""

    value: Any
    why: str | None = None


def begin_with(
    network: nn.Module, config: Any, init: str, vocabulary: Mapping[str, int] | None, free: Collection[str] = ()
) -> None:
    """Load the weights of a drafter of the same kind into a new network.

    Args:
        config: Of the network, a dataclass.
        init: The drafter's folder.
        free: Fields in which its configuration may differ.

    Raises:
        ValueError: It cannot be read, or differs in anything else.
    """
    found, ours = read_drafter(init, vocabulary, config.num_target_layers), type(config).__name__
    need(type(found.config) is type(config), f"the kind of {init}", type(found.config).__name__, f"{ours}; use another")
    for field in fields(config):
        mine, theirs = getattr(config, field.name), getattr(found.config, field.name)
        need(
            mine == theirs or field.name in free,
            f"{field.name} of {init}",
            theirs,
            f"that of the recipe and target, {mine}; change the recipe, or begin without init",
        )
    network.load_state_dict(found.tensors)


R = TypeVar("R", bound=Recipe)
N = TypeVar("N", bound=nn.Module)
C = TypeVar("C", bound=NetworkConfig)


class Variant(ABC, Generic[R, N, C]):
    """One kind of drafter, made for one recipe.

    Attributes:
        recipe_class: Its recipes.
        free_fields: Fields of its own recipe that say how and how often, not what is learned: they may change when a
            run goes on.
        counted: What `counts` counts.
        needs_teacher: Whether `losses` reads `slots.teacher_CKV`, besides what the objectives need.
        fit_gain: Accepted guesses over those of DFlash after equal training, by which `blockdraft fit` weighs a kind;
            None if `fit` does not make it.
    """

    recipe_class: ClassVar[type[Recipe]] = Recipe
    free_fields: ClassVar[frozenset[str]] = frozenset()
    counted: tuple[str, ...] = ()
    needs_teacher: bool = False
    fit_gain: ClassVar[float | None] = None

    @classmethod
    def fit_fields(cls, hidden_size: int) -> dict[str, Any]:
        """Fields of its own recipe that `blockdraft fit` sets for a target of this hidden size."""
        return {}

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe
        self.objectives = {name: find_objective(name) for name in recipe.objective}
        self.needs_teacher = self.needs_teacher or any(one.needs_teacher for one in self.objectives.values())
        gamma = recipe.gamma if recipe.gamma is not None else default_gamma(recipe.block_size)
        self.gamma = gamma or None

    # Configuration and weights

    def settle(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, Choice]:
        """Values of fields of the variant's own recipe that are left to target and data, by name. What cannot be
        settled is noted among the complaints. `config` must do without, so that a network can be made without data."""
        return {}

    @abstractmethod
    def config(self, target: Target) -> C:
        """The network's configuration. What the recipe leaves open is the target's, where it has it.

        Raises:
            ValueError: A value is out of range, or neither the recipe nor the target has it.
        """

    @abstractmethod
    def new_network(self, config: C, vocabulary: Mapping[str, int] | None) -> N:
        """A network to begin with; torch's random numbers are those of the recipe's seed.

        Args:
            vocabulary: The target's tokens and their ids, which some checkpoints are read with.

        Raises:
            ValueError: A checkpoint to begin with cannot be read or has another shape.
        """

    def network(self, config: C, vocabulary: Mapping[str, int] | None = None) -> N:
        """`new_network`, with random numbers that come from the recipe's seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return self.new_network(config, vocabulary)

    def fit_data(self, network: N, data: TokenData) -> None:
        """Called once on a new network, before `fit_head`, for what it has of the data without learning it."""

    def fit_head(self, network: N, target: Target) -> None:
        """Called once on a new network, which may be scaled here to what the target's head expects."""

    def prepare(self, network: N) -> None:
        """Called once before training, such as for recomputing activations. The network's parameters must stay."""

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are written: on the CPU, those of numbers with fractions in the recipe's `save_dtype`."""
        dtype = getattr(torch, self.recipe.save_dtype)
        return {n: t.to("cpu", dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon trains this parameter; AdamW trains the others."""
        return parameter.ndim == 2

    # Guesses and losses

    @property
    def taught_slots(self) -> int:
        """K. The k-th taught slot, k = 1 to K, predicts the k-th token behind the anchor."""
        return self.recipe.block_size - 1

    @abstractmethod
    def hidden(self, network: N, target: Target, features_BSF: Tensor, rows: Rows) -> Tensor:
        """What the network makes of every block at once, `[B, A, K, H]`.

        Args:
            network: The draft network itself, not its wrapper.
            features_BSF: Outputs of the target at `config.taps`, side by side. Those of the anchor and behind it are
                here as well and must not be looked at.
            rows: Tokens, documents and anchors, on the target's device. A negative anchor's block is meaningless.
        """

    def logits(self, network: N, target: Target, hidden_CKH: Tensor) -> Tensor:
        """Logits of a chunk of blocks, `[C, K, V]`: here the target's head. With another vocabulary than the target's,
        `losses` and `guesses` have to know of it."""
        rows = hidden_CKH.to(target.dtype).flatten(0, 1)  # blocks that are slices would be multiplied one by one
        logits: Tensor = target.head(rows).unflatten(0, hidden_CKH.shape[:2])
        return logits

    def factors(self) -> Mapping[str, float]:
        """The terms of the loss and their shares in it, in a fixed order."""
        return self.recipe.objective

    def decayed(self, term: str) -> bool:
        """Whether the term's slots weigh `exp(-(k - 1) / gamma)`; else all weigh alike. A variant's own terms decay."""
        return term not in self.objectives or self.objectives[term].decayed

    def losses(self, network: N, slots: Slots) -> dict[str, Tensor]:
        """Each term's loss of each slot, `[C, K]` float32, for all names of `factors`. The trainer weighs and sums
        them: term t of the loss is `sum(weights * losses) / sum(weights)` over all ranks and accumulated batches.

        A slot that a term has nothing to say about gets 0. `network` is the draft network itself, not its wrapper.
        """
        return {name: objective.losses(slots) for name, objective in self.objectives.items()}

    def guesses(self, network: N, slots: Slots) -> Tensor:
        """`[C, K]` int64: what is guessed greedily at each slot when all guesses before it were right. Accuracies and
        accepted lengths are counted on it."""
        return slots.logits_CKV.argmax(dim=-1)

    def counts(self, network: N, slots: Slots) -> Mapping[str, Tensor]:
        """`[C, K]` bool for all names of `counted`. Their shares of the taught slots are told beside the accuracy."""
        return {}


def variant_names() -> list[str]:
    return part_names("train")


def find_variant(name: str) -> type[Variant[Any, Any, Any]]:
    """The variant of the drafter with this name. Raises ValueError where there is none."""
    if name not in variant_names():
        raise UsageError(f"The variant {name!r} is unknown; there are {', '.join(variant_names())}.")
    found: type[Variant[Any, Any, Any]] = import_module(f"{DRAFTERS}.{name}.train").VARIANT
    return found


def fit_gains() -> dict[str, float]:
    """The kinds that `blockdraft fit` makes, each with its `Variant.fit_gain`."""
    gains = {name: find_variant(name).fit_gain for name in variant_names()}
    return {name: gain for name, gain in gains.items() if gain is not None}
