"""Variants: what the trainer needs to know about a kind of drafter.

A variant is a subclass of `Variant`, named `VARIANT` at the end of a module of `blockdraft_train.variants` or of one
that an entry point of the group of that name names; `blockdraft train <name>` finds it. It makes the network, and
computes the network's output for the K tokens after each anchor. The network may read what a drafter can read: the
hidden states of the tokens strictly before the anchor, the anchor, and the later tokens before the one that it
predicts. The anchor's own hidden states do not exist yet when a drafter drafts.

    @settings
    class MyRecipe(Recipe):
        "Recipe of my drafter."
        my_weight: Amount = Field(1.0, description="Weight of my loss.")

    class MyVariant(Variant[MyRecipe, MyNetwork, MyConfig]):
        recipe_class = MyRecipe

        def config(self, target): return MyConfig(...)
        def new_network(self, config, vocabulary): return MyNetwork(config)
        def hidden(self, network, target, hidden_states_BSF, sequences): ...
        def factors(self): return {**super().factors(), "mine": self.recipe.my_weight}
        def losses(self, network, slots): return {**super().losses(network, slots), "mine": ...}

    VARIANT = MyVariant

A variant of the DFlash family needs less; see `variants/dflash.py`.

`logits`, `losses`, `draft_tokens` and `counts` see a chunk of blocks at a time. They call the modules of the network
that `hidden` does not call, such as a head on top of hidden states and logits. The results of `losses` are dropped and
computed again in the backward pass, so it must neither draw random numbers nor change anything.

`tests/drafters/test_parity.py` tests every variant that it finds: a written drafter that `load_drafter` reads back must
propose what `draft_tokens` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.nn.draft_config import need
from blockdraft.plugins import entry_points, install_hint, load, plugin_names
from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import TokenData
from blockdraft_train.objectives import Slots, default_gamma, find_objective
from blockdraft_train.recipe import Recipe
from blockdraft_train.variants import VARIANTS, variant_names


class NetworkConfig(Protocol):
    """Configuration of any draft network.

    Attributes:
        target_layers: 0-based target layers whose outputs the drafter reads.
    """

    @property
    def target_layers(self) -> tuple[int, ...]: ...


class DerivedValue(NamedTuple):
    """Value of a field that the recipe left open.

    Attributes:
        value: The value.
        why: A few words on the reason; None if the value is the usual one.
    """

    value: Any
    why: str | None = None


def load_init(
    network: nn.Module, config: Any, init: str, vocabulary: Mapping[str, int] | None, free: Collection[str] = ()
) -> None:
    """Load the weights of a drafter of the same kind into a new network.

    Args:
        config: Configuration of the network, a dataclass.
        init: Folder or GGUF file of the drafter.
        vocabulary: Tokens of the target and their ids.
        free: Fields in which the two configurations may differ.

    Raises:
        UsageError: The drafter cannot be read, or its configuration differs in another field.
    """
    drafter, kind = read_drafter(init, vocabulary, config.num_target_layers), type(config).__name__
    same = type(drafter.config) is type(config)
    need(same, f"the kind of {init}", type(drafter.config).__name__, f"{kind}; use another")
    for field in fields(config):
        ours, theirs = getattr(config, field.name), getattr(drafter.config, field.name)
        need(
            ours == theirs or field.name in free,
            f"{field.name} of {init}",
            theirs,
            f"that of the recipe and target, {ours}; change the recipe, or start without init",
        )
    network.load_state_dict(drafter.tensors)


R = TypeVar("R", bound=Recipe)
N = TypeVar("N", bound=nn.Module)
C = TypeVar("C", bound=NetworkConfig)


class Variant(ABC, Generic[R, N, C]):
    """One kind of drafter, with a recipe.

    Attributes:
        recipe_class: Class of its recipes.
        free_fields: Fields of its own recipe that may change when a run resumes, because they do not change what is
            learned.
        counted: Names of the counts that `counts` returns.
        needs_teacher: Whether `losses` reads `slots.teacher_CKV`, for an objective or for a term of its own.
        fit_gain: Accepted draft tokens relative to DFlash after equal training, by which `blockdraft fit` weighs a
            kind; None if `fit` does not make it.
        reducible: Whether its recipe has a field `draft_vocab` that may be set.
        fit_reduced: Whether `fit` compares it only with that field set, since it was measured only so.
        kept: The target's ids of the tokens that the drafter can propose, `[Vd]` int64, ascending, if it runs the
            target's head for these alone. Set by `fit_data`.
    """

    recipe_class: ClassVar[type[Recipe]] = Recipe
    free_fields: ClassVar[frozenset[str]] = frozenset()
    counted: tuple[str, ...] = ()
    needs_teacher: bool = False
    fit_gain: ClassVar[float | None] = None
    reducible: ClassVar[bool] = False
    fit_reduced: ClassVar[bool] = False
    kept: Tensor | None = None

    @classmethod
    def fit_fields(cls, layers: int, hidden_size: int, narrow: bool = False) -> dict[str, Any]:
        """Return the recipe fields that `blockdraft fit` sets for a target of this size.

        None leaves out a field that `fit` sets for most kinds.

        Args:
            narrow: Whether an MLP as wide as the target's would train too slowly.
        """
        return {}

    @classmethod
    def layout(cls, recipe: R, target: Target) -> str | None:
        """Return the only layout in which drafters of a recipe can be written, or None for any of their kind's."""
        return None

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe
        self.objectives = {name: find_objective(name) for name in recipe.objective}
        self.needs_teacher = self.needs_teacher or any(term.needs_teacher for term in self.objectives.values())
        gamma = recipe.gamma if recipe.gamma is not None else default_gamma(recipe.block_size)
        self.gamma = gamma or None

    # Configuration and weights

    def defaults(self, target: Target, data: TokenData | None, complaints: Complaints) -> dict[str, DerivedValue]:
        """Return values, by name, of fields of its own recipe that depend on target and data.

        Faults are added to the complaints. `config` must not need this call, so that networks can be made without data.
        """
        return {}

    @abstractmethod
    def config(self, target: Target) -> C:
        """Return the configuration of the network. Values that the recipe leaves open are taken from the target.

        Raises:
            UsageError: A value is out of range, or neither the recipe nor the target has it.
        """

    @abstractmethod
    def new_network(self, config: C, vocabulary: Mapping[str, int] | None) -> N:
        """Return the network that training starts with. `network` calls this after seeding torch.

        Args:
            vocabulary: Tokens of the target and their ids, which some checkpoints are read with.

        Raises:
            UsageError: The checkpoint named by `init` cannot be read or has another shape.
        """

    def network(self, config: C, vocabulary: Mapping[str, int] | None = None) -> N:
        """Return `new_network`, with random numbers from the recipe's seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return self.new_network(config, vocabulary)

    def fit_data(self, network: N, data: TokenData) -> None:
        """Set buffers of a new network that depend on the data, such as a draft vocabulary. `fit_head` follows."""

    def fit_head(self, network: N, target: Target) -> None:
        """Fit a new network to the target's head, for instance by scaling its last norm."""

    def prepare(self, network: N) -> None:
        """Prepare the network for training, for instance to recompute activations. Its parameters must not change."""

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as they are written: on the CPU, floating-point ones in the recipe's `save_dtype`."""
        dtype = getattr(torch, self.recipe.save_dtype)
        return {n: t.to("cpu", dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return whether Muon trains this parameter; AdamW trains the others."""
        return parameter.ndim == 2

    def is_quantized(self, name: str) -> bool:
        """Return whether this linear layer is quantized when the drafter runs on a CPU next to a quantized target."""
        return False

    # Draft tokens and losses

    @property
    def alone(self) -> float:
        """Share of the steps, at the start of a run, that teach the first slot alone."""
        return 0.0

    @property
    def taught_slots(self) -> int:
        """K. The k-th taught slot, k = 1 to K, predicts the k-th token after the anchor."""
        return self.recipe.block_size - 1

    @abstractmethod
    def hidden(self, network: N, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute the hidden states of all taught slots, `[B, A, K, H]`, of all blocks at once.

        Args:
            network: The draft network itself, not its wrapper.
            hidden_states_BSF: Outputs of the target at `config.target_layers`, concatenated. Those of the anchor and
                of later tokens are included and must not be used.
            sequences: Tokens, documents and anchors, on the target's device. Negative anchors have no block.
        """

    def logits(self, network: N, target: Target, hidden_CKH: Tensor) -> Tensor:
        """Compute the logits of a chunk of blocks, `[C, K, V]`, here by the target's head.

        A variant with another vocabulary than the target's must account for it in `losses` and `draft_tokens`.
        """
        states = hidden_CKH.to(target.dtype).flatten(0, 1)  # a view in three dimensions would be multiplied by slices
        logits: Tensor = target.head(states).unflatten(0, hidden_CKH.shape[:2])
        return logits

    def teacher_logits(self, target: Target, states: Tensor) -> Tensor:
        """Compute the target's logits, `[..., V]`, over the vocabulary of `logits`.

        Args:
            states: `[..., H]`, inputs of the target's head.
        """
        return target.head(states.to(target.dtype))

    def factors(self) -> Mapping[str, float]:
        """Return the terms of the loss and their factors, in a fixed order."""
        return self.recipe.objective

    def decayed(self, term: str) -> bool:
        """Return whether slot k of a term has the weight `exp(-(k - 1) / gamma)`; otherwise all slots weigh the same.

        A variant's own terms decay.
        """
        return term not in self.objectives or self.objectives[term].decayed

    def losses(self, network: N, slots: Slots) -> dict[str, Tensor]:
        """Compute the loss of each slot, `[C, K]` float32, for each term in `factors`.

        The trainer makes term t of the loss from them: `sum(weights * losses) / sum(weights)` over all processes and
        accumulated batches. A slot to which a term does not apply gets 0. `network` is not wrapped.
        """
        return {name: objective.losses(slots) for name, objective in self.objectives.items()}

    def draft_tokens(self, network: N, slots: Slots) -> Tensor:
        """Return the greedy draft token at each slot, `[C, K]` int64, given that all draft tokens before it were right.

        Accuracies and accepted lengths are computed from it.
        """
        return slots.logits_CKV.argmax(dim=-1)

    def counts(self, network: N, slots: Slots) -> Mapping[str, Tensor]:
        """Return masks `[C, K]` bool for all names in `counted`. Their shares of the taught slots are metrics."""
        return {}


def find_variant(name: str) -> type[Variant[Any, Any, Any]]:
    """Return the variant of the drafter with this name.

    Raises:
        UsageError: There is none, or its plugin cannot be loaded.
    """
    module: Any = None
    if name in plugin_names(VARIANTS):
        module = import_module(f"{VARIANTS}.{name}")
    elif name in entry_points(VARIANTS):
        module = load(VARIANTS, name)
    if module is None:
        hint = install_hint(VARIANTS, name)
        remedy = f"; {hint} brings it" if hint else f"; there are {', '.join(variant_names())}"
        raise UsageError(f"The variant {name!r} is unknown{remedy}.")
    variant: type[Variant[Any, Any, Any]] = module.VARIANT
    return variant


def fit_gains() -> dict[str, float]:
    """Map the kinds that `blockdraft fit` makes to their `Variant.fit_gain`."""
    gains = {name: find_variant(name).fit_gain for name in variant_names()}
    return {name: gain for name, gain in gains.items() if gain is not None}
