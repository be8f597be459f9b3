"""Decoding methods that a benchmark compares. Does not import torch, so that the command line starts quickly."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.types import JOINT, Drafting

PLAIN, BUNDLED = "none", "bundled"
# Shapes of proposals that any drafter can make: chains (arXiv 2602.06036), chains of sampled draft tokens, and trees
# (arXiv 2604.12989).
CHAIN, SAMPLED, TREE = "chain", "chain-sampled", "tree"


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        name: Name as given, such as "tree:64"; the key of its results.
        drafter: Drafter as in `load_drafter`; None is the bundled drafter.
        drafting: Size and shape of its proposals.
    """

    name: str
    drafter: str | None
    drafting: Drafting


def parse_methods(
    names: str,
    drafter: str | None,
    block_size: Any,
    tree_budget: Any,
    draft_window: int | None = None,
    draft_passes: int | None = None,
) -> list[Method]:
    """Parse a comma-separated list of methods.

    Args:
        names: Methods, each optionally with a setting after a colon: `none`; `chain`, the drafter's chains, or
            `chain:8` with this block size; `chain-sampled`, chains of sampled draft tokens; `tree`, its trees, or
            `tree:64` with this budget; another drafter by folder or name, optionally with a block size;
            `lookup+chain` and the like, a hybrid of other drafters and `drafter`.
        drafter: Drafter of the shapes, as in `Method`.
        block_size: As in `Drafting`, for methods that set none.
        tree_budget: As in `Drafting`, for `tree` without a budget.
        draft_window, draft_passes: As in `Drafting`.

    Returns:
        The methods in this order; `none`, the reference, comes first if it is missing.

    Raises:
        UsageError: A name is empty or repeated, or a setting is out of range or follows `none`.
    """
    wanted = [name.strip() for name in names.split(",")]
    if PLAIN not in wanted:
        wanted.insert(0, PLAIN)
    for name in wanted:
        if not name:
            raise UsageError(f"methods is {names!r}, which has an empty name; put one comma between two methods.")
        if wanted.count(name) > 1:
            raise UsageError(f"methods is {names!r}, which names {name!r} twice; name it once.")
    chain = Drafting(block_size, draft_window=draft_window, draft_passes=draft_passes)
    return [_method(name, drafter, chain, tree_budget) for name in wanted]


def _method(name: str, drafter: str | None, chain: Drafting, tree_budget: Any) -> Method:
    match = re.fullmatch(r"(.+):(\d+|auto)", name)
    kind, text = (match[1], match[2]) if match else (name, None)
    setting: Any = int(text) if text is not None and text != "auto" else text
    *others, last = kind.split(JOINT)
    if others and last in (CHAIN, SAMPLED, TREE):
        kind, drafter = last, JOINT.join([*others, drafter or BUNDLED])
    if kind == PLAIN:
        if setting is not None:
            raise UsageError(f"Method {name!r} has a setting, but {PLAIN} drafts nothing; leave the setting out.")
        return Method(name, PLAIN, Drafting(None))
    if kind == TREE:
        return Method(name, drafter, replace(chain, tree_budget=tree_budget if setting is None else setting))
    size = chain.block_size if setting is None else setting
    drafting = replace(chain, block_size=size, sampled=kind == SAMPLED)
    return Method(name, drafter if kind in (CHAIN, SAMPLED) else kind, drafting)
