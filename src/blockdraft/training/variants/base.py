"""What the trainer knows of a kind of drafter.

A variant is one file of this package. It subclasses `Variant`, sets what differs, and names the class `VARIANT` at the
end of the file; `blockdraft train <file name>` finds it. All that trains DFlash v1 is in the base class, so a variant
states its network, its own recipe fields and its own losses:

    @settings
    class MyRecipe(Recipe):
        "Attributes:  (each field explained here, as in `Recipe`)"
        my_weight: Amount = 1.0

    class MyVariant(Variant):
        recipe_class = MyRecipe
        network_class = MyNetwork  # its `config_class` is what `config` makes
        own_modules = ("candidate_selector", "conv")

        def own_config(self): return {"selector_rank": self.recipe.selector_rank}
        def factors(self): return super().factors() | {"selector": self.recipe.my_weight}
        def losses(self, network, slots): return super().losses(network, slots) | {"selector": ...}
        def guesses(self, network, slots): ...

    VARIANT = MyVariant

`first_slot` settles the labels: the k-th taught slot (k = 1 to K) always predicts the k-th token behind the anchor.
With `first_slot = 1` (DFlash) slot 0, the anchor's own, is not taught and K = block_size - 1; with `first_slot = 0`
(DSpark, "shifted labels") it is, and K = block_size.

`losses`, `guesses` and `counts` see a chunk of blocks at a time. Modules of the network that its `forward` does not
call, such as a head on top of hidden states and logits, are called there. What `losses` computes is thrown away and
computed again in the backward pass, so it must not draw random numbers or change anything.

The parity test in `tests/training/variants/test_parity.py` runs over every file here without being told: what
`load_drafter` reads back must guess what `guesses` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from blockdraft.data.features import chosen_taps
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.dflash import DFlashNetwork, DraftLayer
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, need
from blockdraft.targets import Target
from blockdraft.training.objectives import Slots, default_gamma, find_objective
from blockdraft.training.recipe import Recipe

R = TypeVar("R", bound=Recipe)
N = TypeVar("N", bound=DFlashNetwork)

INIT_STD = 0.02  # of new matrices, except `fc`, which keeps the size of what it reads


class Variant(Generic[R, N]):
    """One kind of drafter, made for one recipe.

    Attributes:
        recipe_class: Its recipes.
        network_class: Its network.
        first_slot: The first slot that is taught, 1 or 0.
        own_modules: Parts of the names of parameters that DFlash v1 lacks. The network initialises them itself, and a
            warm start from a checkpoint without them is welcome.
        counted: What `counts` counts.
        needs_teacher: Whether `losses` reads `slots.teacher_CKV`, besides what the objectives need.
    """

    recipe_class: type[Recipe] = Recipe
    network_class: type[DFlashNetwork] = DFlashNetwork
    first_slot: int = 1
    own_modules: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    needs_teacher: bool = False

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe
        self.objectives = {name: find_objective(name) for name in recipe.objective}
        self.needs_teacher = self.needs_teacher or any(one.NEEDS_TEACHER for one in self.objectives.values())
        gamma = recipe.gamma if recipe.gamma is not None else default_gamma(recipe.block_size)
        self.gamma = gamma or None

    # Configuration and weights

    def config(self, target: Target, mask_token_id: int) -> DraftConfig:
        """The network's configuration. What the recipe leaves open is the target's, where it has it.

        Raises:
            ValueError: A value is out of range, or neither the recipe nor the target has it.
        """
        recipe, shape = self.recipe, target.shape
        taps = chosen_taps(recipe.taps, target.num_layers)
        sizes: dict[str, Any] = {
            "intermediate_size": recipe.intermediate_size or shape.get("intermediate_size"),
            "num_attention_heads": recipe.heads or shape.get("num_attention_heads"),
            "num_key_value_heads": recipe.kv_heads or shape.get("num_key_value_heads"),
            "head_dim": recipe.head_dim or shape.get("head_dim"),
        }
        flags = dict(zip(sizes, ("intermediate_size", "heads", "kv_heads", "head_dim"), strict=True))
        for name, value in sizes.items():
            need(value is not None, name, value, f"given, since this target has none; add it as {flags[name]}")
        shared = {name: shape[name] for name in ("rope_theta", "rope_scaling", "rms_norm_eps") if name in shape}
        made = self.network_class.config_class(
            **sizes,
            **{"rope_theta": 10_000.0, **shared},
            **self.own_config(),
            hidden_size=target.hidden_size,
            num_hidden_layers=recipe.layers,
            vocab_size=target.vocab_size,
            block_size=recipe.block_size,
            mask_token_id=mask_token_id,
            taps=taps,
            num_target_layers=target.num_layers,
            layers=(LayerAttention(recipe.causal, recipe.window or None),) * recipe.layers,
            max_position_embeddings=target.max_context,
        )
        return made

    def own_config(self) -> Mapping[str, Any]:
        """Fields of the configuration that DFlash v1 lacks."""
        return {}

    def network(self, config: DraftConfig, vocabulary: Mapping[str, int] | None = None) -> N:
        """A network to begin with: new, or that of `recipe.init`. Random numbers come from the recipe's seed alone.

        Raises:
            ValueError: The checkpoint cannot be read or has another shape.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            network = self.network_class(config)
            for name, parameter in network.named_parameters():
                if parameter.ndim == 2 and not self._own(name):
                    nn.init.normal_(parameter, std=parameter.size(1) ** -0.5 if name == "fc.weight" else INIT_STD)
        if self.recipe.init is not None:
            self.warm_start(network, Path(self.recipe.init), vocabulary)
        return cast(N, network)

    def warm_start(self, network: DFlashNetwork, path: Path, vocabulary: Mapping[str, int] | None) -> None:
        """Load a checkpoint of this kind, or one of DFlash v1 into what of the network is DFlash v1. The block size may
        differ, and the checkpoint may have fewer layers: those behind them change nothing to begin with. Raises
        ValueError where anything else differs."""
        config, tensors = read_checkpoint(path, vocabulary)
        depth = config.num_hidden_layers
        for field in fields(config):
            ours, theirs = getattr(network.config, field.name, None), getattr(config, field.name)
            same = math.isclose(ours, theirs) if isinstance(ours, float) and theirs is not None else ours == theirs
            if field.name in ("num_hidden_layers", "layers"):
                same = depth <= network.config.num_hidden_layers and network.config.layers[:depth] == config.layers
            need(
                same or field.name in ("block_size", "max_position_embeddings"),
                f"{field.name} of {path}",
                theirs,
                f"that of the recipe and target, {ours}; change the recipe, or begin without init",
            )
        missing, unknown = network.load_state_dict(tensors, strict=False)
        new = tuple(f"layers.{index}." for index in range(depth, network.config.num_hidden_layers))
        foreign = [*unknown, *(name for name in missing if not self._own(name) and not name.startswith(new))]
        need(not foreign, f"what {path} holds", foreign[:5], "the tensors of this drafter; begin without init")
        for layer in cast("list[DraftLayer]", list(network.layers)[depth:]):
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are written: on the CPU, in the recipe's `save_dtype`."""
        dtype = getattr(torch, self.recipe.save_dtype)
        return {name: tensor.to("cpu", dtype) for name, tensor in tensors.items()}

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon trains this parameter; AdamW trains the others."""
        return parameter.ndim == 2

    def _own(self, name: str) -> bool:
        return any(part in name for part in self.own_modules)

    # Labels and losses

    @property
    def taught_slots(self) -> int:
        """K."""
        return self.recipe.block_size - self.first_slot

    def factors(self) -> Mapping[str, float]:
        """The terms of the loss and their shares in it, in a fixed order."""
        return self.recipe.objective

    def decayed(self, term: str) -> bool:
        """Whether the term's slots weigh `exp(-(k - 1) / gamma)`; else all weigh alike. A variant's own terms decay."""
        return term not in self.objectives or self.objectives[term].DECAYED

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
