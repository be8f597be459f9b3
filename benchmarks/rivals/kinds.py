"""Kinds of drafters: how large each is made, which weights it reads for a draft, and how it is loaded or widened."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.rivals.records import NATIVE
from benchmarks.sizes.widen import WIDTHS, widen
from blockdraft import load_drafter, load_target
from blockdraft.drafters import Drafter, entries
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.errors import UsageError
from blockdraft.formats import read_config, read_drafter
from blockdraft.settings import Count, settings
from blockdraft.targets import BUNDLED, Target
from blockdraft.training.recipe import Recipe
from blockdraft.training.variant import find_variant

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

SMALL_LM, PROMPT_LOOKUP = "small_lm", "prompt_lookup"


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    Attributes:
        name: In files and flags; of those that our trainer makes, the name of the variant.
        title: For people.
        free: Field of its recipe that settles the size; empty where there is nothing to train.
        step: Between two values of it.
        passed, observed, walked: Patterns of the names of its parameters that are read by each draft pass, once a cycle
            for the committed tokens, and once for each guess.
        target_head: Whether a pass ends in the target's own output projection.
        trees: Whether it drafts trees.
    """

    name: str
    title: str
    free: str = ""
    step: int = 1
    passed: str = "$"
    observed: str = "$"
    walked: str = "$"
    target_head: bool = True
    trees: bool = True

    @property
    def trained(self) -> bool:
        return bool(self.free)


BLOCK = {"passed": r"layers|norm|.*hidden_projection", "observed": r"fc|hidden_norm|layers.*\.[kv]_proj"}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("dflash", "DFlash", "intermediate_size", 16, **BLOCK),
        Kind("dflash2", "DFlash2", "intermediate_size", 16, **BLOCK),
        Kind("dspark", "DSpark", "intermediate_size", 16, walked=r".*markov_w2", **BLOCK),
        Kind("flow", "flow map", "intermediate_size", 16, r"layers|norm|(state|time)_proj", BLOCK["observed"]),
        Kind("eagle3", "EAGLE-3", "draft_vocab", 16, r"midlayer|norm|lm_head", r"fc|.*\.[kv]_proj", target_head=False),
        Kind("medusa", "Medusa", "layers", 1, r".*"),
        Kind("mtp", "MTP", "intermediate_size", 16, r".*", r"fc|.*\.[kv]_proj"),
        Kind(SMALL_LM, "small LM", "hidden_size", 16, r".*", target_head=False, trees=False),
        Kind(PROMPT_LOOKUP, "prompt lookup", target_head=False),
    )
}


@settings
class SmallLMRecipe(Recipe):
    """A language model of the target's tokens, with an embedding that is its head too."""

    layers: Count = Field(4, description="Its layers.")
    hidden_size: Count | None = Field(None, description="Its hidden size; the MLPs are three times as wide.")


def small_lm_config(recipe: SmallLMRecipe, target: Target) -> Qwen3Config:
    size = recipe.hidden_size or 16
    head_dim = int(target.shape.get("head_dim") or 64)
    heads = max(1, round(size / head_dim))
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=sorted(target.eos_token_ids) or None,
        pad_token_id=None,
    )


def new_network(kind: Kind, recipe: Recipe, target: Target) -> nn.Module:
    """A new network of this kind; within `torch.device("meta")` its shape alone."""
    if kind.name == SMALL_LM:
        assert isinstance(recipe, SmallLMRecipe)
        return Qwen3ForCausalLM(small_lm_config(recipe, target))
    variant = find_variant(kind.name)(recipe)
    with torch.device("cpu"):  # where its mask token is looked for
        config = variant.config(target)
    return variant.network(config)


def parameters(kind: Kind, recipe: Recipe, target: Target) -> int:
    """Weights that a drafter of this recipe has of its own."""
    with torch.device("meta"):
        network = new_network(kind, recipe, target)
    return sum(each.numel() for each in network.parameters())


def weights_read(kind: Kind, network: nn.Module, draft_tokens: int, target: Target) -> tuple[int, int]:
    """Number of weights that are read by each draft pass of so many guesses, the target's head among them if it is
    used, and once a cycle for the tokens that were committed."""

    def found(pattern: str) -> int:
        return sum(each.numel() for name, each in network.named_parameters() if re.match(pattern, name))

    ends_in_target = kind.target_head and getattr(network.config, "shared_head", True)  # Medusa's may have their own
    head = target.vocab_size * target.hidden_size if ends_in_target else 0
    return found(kind.passed) + draft_tokens * found(kind.walked) + head, found(kind.observed)


def target_weights_read(target: Target) -> int:
    """Number of weights that a forward of the target reads: all but an embedding that is not its head too."""
    shapes = [weight.shape for _, weight in target.named_weights()]
    table = torch.Size((target.vocab_size, target.hidden_size))
    return sum(shape.numel() for shape in shapes) - (table.numel() if shapes.count(table) > 1 else 0)


def read_tables(file: Path) -> dict[str, dict[str, Any]]:
    """The values of every kind that is trained, from a TOML file with a table for each and one, "all", for all of them.

    Raises:
        UsageError: It cannot be read, or a table is of no kind.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error}).") from error
    trained = [name for name, kind in KINDS.items() if kind.trained]
    if unknown := sorted(tables.keys() - {"all", *trained}):
        raise UsageError(f"{file} has the tables {', '.join(unknown)}; there are all, {', '.join(trained)}.")
    return {name: {**tables.get("all", {}), **tables.get(name, {})} for name in trained}


def recipe_of(kind: Kind, values: dict[str, Any]) -> Recipe:
    """Recipe of a kind. Raises UsageError for unknown values, or where they leave open which tokens a step sees."""
    recipe_class: type[Recipe] = SmallLMRecipe if kind.name == SMALL_LM else find_variant(kind.name).recipe_class
    try:
        recipe = recipe_class(**values)
    except UsageError as error:
        raise UsageError(f"The recipe of {kind.name}: {error}") from error
    if open_ := [name for name in ("length", "batch", "held_out") if getattr(recipe, name) is None]:
        raise UsageError(f"The recipe of {kind.name} has no {', '.join(open_)}; give it in the table [all].")
    return recipe


def fitted(kind: Kind, values: dict[str, Any], target: Target, budget: int) -> Recipe:
    """The recipe with the size whose number of weights is nearest to a budget, unless it names that size."""
    recipe = recipe_of(kind, values)
    if kind.free in values:
        return recipe

    def sized(steps: int) -> Recipe:
        return replace(recipe, **{kind.free: kind.step * steps})

    most = target.vocab_size // kind.step if kind.free == "draft_vocab" else None
    steps = largest(lambda steps: parameters(kind, sized(steps), target) <= budget, most)
    near = [steps, steps + 1] if most is None or steps < most else [steps]
    return min(map(sized, near), key=lambda each: abs(parameters(kind, each, target) - budget))


def largest(holds: Callable[[int], bool], most: int | None = None) -> int:
    """Largest integer from 1 to `most` for which a monotone predicate holds; 1 where it never does."""
    low, high = 1, 2
    while (most is None or high < most) and holds(high):
        low, high = high, 2 * high
    high = high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def target_of(path: str | None, width: int, running: str, insist: bool, folder: Path) -> Target:
    """Load the target, or the same made wider; it says the same words then.

    Args:
        insist: Refuse one that is not compiled where it is to run natively.
        folder: For the wider one, which is written there and stays.

    Raises:
        UsageError: It is not compiled, or cannot be made wider.
    """
    source: str | Path | None = path
    if width > 1:
        source = Path(path or BUNDLED)
        if not source.is_dir() or read_config(source).get("model_type") != "qwen3":
            raise UsageError(f"{source} is no folder of a Qwen3 model, which alone can be made wider; use --widths 1.")
        source = _widened(source, folder / f"target-{width}", width)
    if running != NATIVE or not insist:
        return load_target(source, compile="auto" if running == NATIVE else "off")
    try:
        return load_target(source, backend="native", compile="on")
    except UsageError as error:
        raise UsageError(f"{error} Or add --uncompiled, to measure it as it runs.") from error


def _widened(source: Path, out: Path, width: int) -> Path:
    """The widened model, which an earlier run may have written."""
    if not out.exists():
        partial = out.with_name(f"{out.name}.partial")
        widen(source, partial, width).replace(out)
    return out


def drafter_of(kind: str, path: Path | None, target: Target, width: int, running: str, folder: Path) -> Drafter:
    """Load a drafter for a target of `target_of`. A wider one has random weights: its cycles cost what those of a
    trained one cost, and its guesses are worth nothing.

    Args:
        path: Of the trained one; None where nothing is trained.
    """
    if path is None:
        return load_drafter(kind, target=target)
    if kind == SMALL_LM:
        wide = path if width == 1 else _widened(path, folder / f"{kind}-{width}", width)
        model = load_target(wide, target.dtype, target.device, compile="auto" if running == NATIVE else "off")
        return DraftLMDrafter(model, target)
    if width == 1:
        return load_drafter(path, target=target)
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    narrow = read_drafter(path, vocabulary, target.num_layers).config
    wide_sizes = {name: width * getattr(narrow, name) for name in WIDTHS if hasattr(narrow, name)}
    entry = entries()[KINDS[kind].name]
    assert entry.network is not None and entry.drafter is not None
    make: Any = entry.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make(replace(narrow, **wide_sizes))
    return entry.drafter(network.bfloat16().float(), target)  # so that they are kept in bfloat16, as a trained one's


def check_compiled(kind: str, drafter: Drafter) -> None:
    """Refuse a drafter that could be compiled and is not."""
    reason = getattr(drafter, "compile_reason", None)
    if reason is not None:
        raise UsageError(f"{KINDS[kind].title} is not compiled: {reason}. Add --uncompiled to measure it all the same.")
