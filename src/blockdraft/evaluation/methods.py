"""Methods of decoding that a benchmark compares, and how it measures them. Imports no torch, so that the command line
can read the defaults quickly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.types import JOINT, Drafting

PLAIN, BUNDLED = "none", "bundled"
# Shapes in which the drafter at hand guesses: chains (arXiv 2602.06036), chains of guesses sampled at random, and trees
# (arXiv 2604.12989). Any drafter has them.
CHAIN, SAMPLED, TREE = "chain", "chain-sampled", "tree"
ALIASES = {"dflash": CHAIN, "dflash-drawn": SAMPLED, "ddtree": TREE}  # former names, which named drafters


@dataclass(frozen=True)
class Settings:
    """How a benchmark measures.

    Attributes:
        limit: Prompts taken of each file, from its beginning; None takes all.
        batch_size: Prompts decoded together.
        repeats: Rounds; in each of them every method decodes every prompt.
        tree_budget: Most guesses of a draft tree, the anchor not counted, for `tree` without a number.
    """

    limit: int | None = None
    batch_size: int = 1
    repeats: int = 3
    tree_budget: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}; it must be at least 1.")
        if self.repeats < 1:
            raise UsageError(f"repeats is {self.repeats}; it must be at least 1.")


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: As it was asked for, such as "tree:64"; `results.json` has it under this name.
        drafter: As `load_drafter` takes it; None is the bundled drafter.
        drafting: How far it drafts.
    """

    name: str
    drafter: str | None
    drafting: Drafting


def shape_name(name: str) -> str:
    """The name of a method by its shape: "tree:64" for "ddtree:64". Names that are not aliases stay as they are."""
    kind, setting = _split(name)
    *others, last = kind.split(JOINT)
    return JOINT.join([*others, ALIASES.get(last, last)]) + ("" if setting is None else f":{setting}")


def _split(name: str) -> tuple[str, str | None]:
    """Kind and setting of a method."""
    match = re.fullmatch(r"(.+):(\d+|auto)", name)
    return (match[1], match[2]) if match else (name, None)


def parse_methods(
    names: str,
    drafter: str | None,
    block_size: Any,
    tree_budget: Any,
    draft_window: int | None = None,
    draft_passes: int | None = None,
) -> list[Method]:
    """Read a list of methods.

    Args:
        names: Methods with commas between them, each with or without a setting behind a colon: `none`; `chain`, the
            drafter's chains, or `chain:8` with this block size; `chain-sampled`, chains of guesses sampled at random;
            `tree`, its trees, or `tree:64` with this budget; any other drafter by folder or name, with or without a
            block size; `prompt_lookup+chain` and the like, other drafters together with the one at hand, in each of
            these shapes. `dflash`, `dflash-drawn` and `ddtree` are former names of the three shapes.
        drafter: The drafter at hand, as in `Method`.
        block_size: As in `Drafting`, for methods without one of their own.
        tree_budget: As in `Drafting`, for `tree` without one of its own.
        draft_window, draft_passes: As in `Drafting`.

    Returns:
        The methods in the order given; `none` is put first where it is missing, since it is the reference.

    Raises:
        ValueError: An empty name, a method that is named twice, or a setting that is out of range or follows `none`.
    """
    wanted = [name.strip() for name in names.split(",")]
    if PLAIN not in wanted:
        wanted.insert(0, PLAIN)
    shapes = [shape_name(name) for name in wanted]
    for name, shape in zip(wanted, shapes, strict=True):
        if not name:
            raise UsageError(f"methods is {names!r}, which has an empty name; put one comma between two methods.")
        if shapes.count(shape) > 1:
            raise UsageError(f"methods is {names!r}, which names {shape!r} twice; name it once.")
    drafting = partial(Drafting, draft_window=draft_window, draft_passes=draft_passes)
    return [_method(name, drafter, block_size, tree_budget, drafting) for name in wanted]


def _method(
    name: str, drafter: str | None, block_size: Any, tree_budget: Any, drafting: Callable[..., Drafting]
) -> Method:
    kind, text = _split(shape_name(name))
    setting: Any = int(text) if text is not None and text != "auto" else text
    *others, last = kind.split(JOINT)
    if others and last in (CHAIN, SAMPLED, TREE):
        kind, drafter = last, JOINT.join([*others, drafter or BUNDLED])
    if kind == PLAIN:
        if setting is not None:
            raise UsageError(f"Method {name!r} has a setting, but {PLAIN} drafts nothing; leave the setting out.")
        return Method(name, PLAIN, Drafting())
    if kind == TREE:
        return Method(name, drafter, drafting(block_size, tree_budget if setting is None else setting))
    chains = drafting(block_size if setting is None else setting, sampled=kind == SAMPLED)
    return Method(name, drafter if kind in (CHAIN, SAMPLED) else kind, chains)
