"""Decoding methods that a benchmark compares. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.types import JOINT, Drafting

PLAIN, BUNDLED = "none", "bundled"
# Shapes of proposals, which any drafter can make: chains (arXiv 2602.06036), chains of guesses sampled at random, and
# trees (arXiv 2604.12989).
CHAIN, SAMPLED, TREE = "chain", "chain-sampled", "tree"
ALIASES = {"dflash": CHAIN, "dflash-drawn": SAMPLED, "ddtree": TREE}  # former names


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        name: Name that it was asked for by, such as "tree:64", which is its key in `results.json`.
        drafter: Drafter as `load_drafter` takes it; None is the bundled drafter.
        drafting: Extent and shape of its proposals.
    """

    name: str
    drafter: str | None
    drafting: Drafting


def shape_name(name: str) -> str:
    """Present name of a method: "tree:64" for its former name "ddtree:64", other names unchanged."""
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
        names: Methods with commas between them, each with or without a setting after a colon: `none`; `chain`, the
            drafter's chains, or `chain:8` with this block size; `chain-sampled`, chains of guesses sampled at random;
            `tree`, its trees, or `tree:64` with this budget; any other drafter by folder or name, with or without a
            block size; `prompt_lookup+chain` and the like, other drafters combined with `drafter`, in each of these
            shapes. `dflash`, `dflash-drawn` and `ddtree` are former names of the three shapes.
        drafter: Drafter of the shapes, as in `Method`.
        block_size: As in `Drafting`, for methods without one of their own.
        tree_budget: As in `Drafting`, for `tree` without one of its own.
        draft_window, draft_passes: As in `Drafting`.

    Returns:
        The methods in this order; `none`, the reference, is put first if it is missing.

    Raises:
        UsageError: A name is empty or repeated, or a setting is out of range or follows `none`.
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
        return Method(name, PLAIN, Drafting(None))
    if kind == TREE:
        return Method(name, drafter, drafting(block_size, tree_budget if setting is None else setting))
    chains = drafting(block_size if setting is None else setting, sampled=kind == SAMPLED)
    return Method(name, drafter if kind in (CHAIN, SAMPLED) else kind, chains)
