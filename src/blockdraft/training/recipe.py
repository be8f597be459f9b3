"""Recipes: everything that shapes a training run, from a TOML file, flags, or both."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from blockdraft.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

R = TypeVar("R", bound="Recipe")


@dataclass(frozen=True)
class Recipe:
    """What every variant of training knows; a variant may add fields and change defaults by subclassing.

    Rate, warm-up, clipping, epochs, layers, taps, anchors and length are those of arXiv 2602.06036.

    Attributes:
        layers: Draft layers.
        block_size: Tokens of a block, anchor included.
        taps: Target layers that the drafter reads: how many, spread over the target, or a list of 0-based layers.
        causal: Whether a slot sees only the slots up to its own; otherwise it sees its whole block.
        window: Sliding window of every draft layer in tokens; 0 is full attention.
        intermediate_size: Inner size of the draft layers' MLP; None is the target's.
        heads: Query heads of the draft layers; None is the target's.
        kv_heads: Key/value heads of the draft layers; None is the target's.
        head_dim: Size of a head; None is the target's.
        mask_token_id: Token that stands for an unknown one; None is the tokenizer's mask token or, without one, the
            first row of the embedding that the tokenizer does not use.
        init: Folder of a drafter whose weights training begins with, of as many layers or fewer; None begins at random.
        length: Tokens of a row. Documents are packed into rows, longer ones are cut.
        batch: Rows of a step, over all processes and accumulated batches.
        anchors: Blocks of a row, drawn anew in each epoch.
        anchor_placement: "random", or "fixed" for blocks that follow each other, as a baseline.
        held_out: Documents that are kept back to measure on.
        features: Where the target's hidden states come from: None runs the target in the loop, "memory" computes them
            once at the start and keeps them in memory in bfloat16, anything else is a folder of stored features.
        objective: Names of objectives and their weights.
        gamma: Decay constant in slots of the objectives that decay; None goes by the block size, 0 is no decay.
        epochs: Passes over the data.
        steps: Optimiser steps; None goes by `epochs`.
        optimizer: "adamw", or "muon" for matrices with AdamW for the rest.
        learning_rate: Peak learning rate of AdamW.
        muon_learning_rate: Peak learning rate of Muon.
        weight_decay: Weight decay of AdamW.
        muon_weight_decay: Weight decay of Muon.
        schedule: How the rates fall after the warm-up: "cosine", "linear", or "wsd": constant, then by the cosine over
            the last fifth.
        warmup: Share of the steps in which the rates rise.
        final: Share of the peak rates at the end.
        clip: Largest norm of the gradient; 0 does not clip.
        seed: Of initial weights, order, anchors and the choice of held-out documents.
        dtype: Arithmetic of the draft network: "auto" is bfloat16 on a GPU and float32 on a CPU. The weights that are
            trained are float32 either way.
        save_dtype: Of the drafter that is written.
        accumulation: Batches of each process that make up a step.
        checkpoint_activations: Recompute the draft layers' activations in the backward pass, to save memory.
        chunk: Blocks whose logits exist at once.
        attention: "flex" (FlexAttention), "dense" (a mask of booleans), or "auto": flex on a GPU.
        compile: Compile the training step, which takes a minute and then saves time.
        eval_every: Steps between evaluations; 0 evaluates at the end alone.
        eval_prompts: Held-out prompts that the engine answers at an evaluation.
        eval_tokens: Most tokens of such an answer.
        save_every: Steps between checkpoints; 0 saves at the end alone.
        keep: Checkpoints that are kept, the newest ones.
        trackers: Trackers of Accelerate that are told the figures besides log.jsonl.
    """

    layers: int = 5
    block_size: int = 16
    taps: int | tuple[int, ...] = 5
    causal: bool = False
    window: int = 0
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mask_token_id: int | None = None
    init: str | None = None
    length: int = 3072
    batch: int = 8
    anchors: int = 512
    anchor_placement: Literal["random", "fixed"] = "random"
    held_out: int = 64
    features: str | None = None
    objective: Mapping[str, float] = field(default_factory=lambda: {"decay": 1.0})
    gamma: float | None = None
    epochs: int = 6
    steps: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.0
    muon_weight_decay: float = 0.01
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: float = 0.04
    final: float = 0.0
    clip: float = 1.0
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    save_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    accumulation: int = 1
    checkpoint_activations: bool = False
    chunk: int = 128
    attention: Literal["auto", "flex", "dense"] = "auto"
    compile: bool = False
    eval_every: int = 500
    eval_prompts: int = 16
    eval_tokens: int = 128
    save_every: int = 500
    keep: int = 2
    trackers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        least = {"layers": 1, "block_size": 2, "length": 2, "batch": 1, "anchors": 1, "held_out": 0, "epochs": 1}
        least |= {"steps": 1, "accumulation": 1, "chunk": 1, "keep": 1, "window": 0, "eval_every": 0, "save_every": 0}
        least |= {
            "eval_prompts": 0,
            "eval_tokens": 1,
            "seed": 0,
            "learning_rate": 0,
            "muon_learning_rate": 0,
            "clip": 0,
        }
        least |= {"weight_decay": 0, "muon_weight_decay": 0, "warmup": 0, "final": 0, "gamma": 0, "mask_token_id": 0}
        least |= dict.fromkeys(("intermediate_size", "heads", "kv_heads", "head_dim"), 1)
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not limit <= value < float("inf"):
                raise UsageError(f"{name} is {value}; it must be at least {limit}.")
        for name in ("warmup", "final"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it is a share and must be at most 1.")
        if not self.objective or min(self.objective.values()) < 0 or max(self.objective.values()) == 0:
            raise UsageError(f"objective is {dict(self.objective)}; give names and weights of 0 or more, not all 0.")
        if self.batch % self.accumulation:
            raise UsageError(f"batch is {self.batch}; it must be a multiple of accumulation, {self.accumulation}.")


def explain(kind: type[Recipe], name: str) -> str:
    """What a field means, from the docstring of the class that brought it."""
    for owner in kind.__mro__:
        found = re.search(rf"^( *){name}: (.+?)(?=\n\1\S|\Z)", inspect.getdoc(owner) or "", re.S | re.M)
        if found:
            return " ".join(found[2].split())
    raise AssertionError(f"{kind.__name__} does not explain {name}")


def read_recipe(kind: type[R], file: Path | None = None, flags: Mapping[str, str] | None = None) -> R:
    """The recipe of a TOML file, with what the flags say in place of what it says.

    Args:
        kind: The variant's class of recipes.
        file: None takes the defaults.
        flags: Values as texts: "5", "true", "none", "1,9,17" for lists, "decay=0.5,forward_kl=0.5" for tables.

    Raises:
        ValueError: The file cannot be read, a key is unknown, or a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{file} cannot be read as a recipe ({error}).") from error
    flags = {name.replace("-", "_"): text for name, text in (flags or {}).items()}
    kinds = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for name in [*values, *flags]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UsageError(f"The recipe has no key {name!r}; the nearest one is {near!r}.")
    made = {name: _checked(name, kinds[name], value) for name, value in values.items()}
    made |= {name: _parsed(name, kinds[name], text) for name, text in flags.items()}
    return kind(**made)


def as_toml(recipe: Recipe, explained: bool = False) -> str:
    """The recipe as a TOML file, every field of it; those that are None as comments."""
    lines = []
    for name, value in asdict(recipe).items():
        if explained:
            lines += ["", f"# {explain(type(recipe), name)}"]
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return repr(value)


def _kinds(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]


def _told(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin is tuple:
        return f"a list of {_told(inside[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table of numbers by name"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return names[kind]


def _checked(name: str, kind: Any, value: Any) -> Any:
    """The value of a TOML file, as the field's type has it."""
    for one in _kinds(kind):
        origin, inside = get_origin(one), get_args(one)
        if origin is Literal and value in inside:
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_checked(name, inside[0], part) for part in value)
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {key: _checked(f"{name}.{key}", inside[1], part) for key, part in value.items()}
        if one is float and type(value) in (int, float):
            return float(value)
        if origin is None and type(value) is one:
            return value
    raise UsageError(f"{name} is {value!r}; it must be {', or '.join(map(_told, _kinds(kind)))}.")


def _parsed(name: str, kind: Any, text: str) -> Any:
    """The value of a flag, as the field's type has it."""
    for one in _kinds(kind):
        origin, inside = get_origin(one), get_args(one)
        try:
            if one is type(None) and text.lower() == "none":
                return None
            if one is bool and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if one in (int, float):
                return one(text)
            if one is str and text.lower() != "none":
                return text
            if origin is Literal and text in inside:
                return text
            if origin is tuple:
                return tuple(_parsed(name, inside[0], part.strip()) for part in text.split(",") if part.strip())
            if isinstance(origin, type) and issubclass(origin, Mapping):
                pairs = (part.partition("=") for part in text.strip("{} ").split(","))
                return {key.strip(): float(number) for key, _, number in pairs}
        except ValueError:
            continue
    raise UsageError(f"{name} is {text!r}; it must be {', or '.join(map(_told, _kinds(kind)))}.")
