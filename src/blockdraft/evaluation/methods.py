"""What a benchmark compares, and how it measures. Free of torch, so that a command line can read the defaults."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.types import JOINT, Drafting

PLAIN, BUNDLED = "none", "bundled"
# All draft with the checkpoint at hand: chains (arXiv 2602.06036), chains of guesses sampled at random, and trees of
# its guesses (arXiv 2604.12989).
CHAINS, SAMPLED, TREES = "dflash", "dflash-drawn", "ddtree"


@dataclass(frozen=True)
class Settings:
    """How a benchmark measures.

    Attributes:
        limit: Prompts taken of each file, from its beginning; None takes all.
        batch_size: Prompts decoded together.
        repeats: Rounds; in each of them every method decodes every prompt.
        tree_budget: Most guesses of a draft tree, the anchor not counted, for `ddtree` without a number.
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
        name: As it was asked for, such as "ddtree:64".
        drafter: As `load_drafter` takes it; None is the bundled drafter.
        drafting: How far it drafts.
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
    """Read a list of methods.

    Args:
        names: With commas between them, each with or without a setting behind a colon: `none`; `dflash`, the drafter's
            chains, or `dflash:8` with this block size; `dflash-drawn`, chains of sampled guesses; `ddtree`, its trees,
            or `ddtree:64` with this budget; any other drafter by folder or name, with or without a block size;
            `prompt_lookup+dflash` and the like, other drafters together with the one at hand, in each of these ways.
        drafter: What `dflash` and `ddtree` draft with, as in `Method`.
        block_size: As in `Drafting`, for methods without one of their own.
        tree_budget: As in `Drafting`, for `ddtree` without one of its own.
        draft_window, draft_passes: As in `Drafting`.

    Returns:
        The methods in the order given; `none` is put first where it is missing, since it is the reference.

    Raises:
        ValueError: An empty name, one that occurs twice, or a setting that is out of range or follows `none`.
    """
    wanted = [name.strip() for name in names.split(",")]
    if PLAIN not in wanted:
        wanted.insert(0, PLAIN)
    for name in wanted:
        if not name:
            raise UsageError(f"methods is {names!r}, which has an empty name; put one comma between two methods.")
        if wanted.count(name) > 1:
            raise UsageError(f"methods is {names!r}, which names {name!r} twice; name it once.")
    drafting = partial(Drafting, draft_window=draft_window, draft_passes=draft_passes)
    return [_method(name, drafter, block_size, tree_budget, drafting) for name in wanted]


def _method(
    name: str, drafter: str | None, block_size: Any, tree_budget: Any, drafting: Callable[..., Drafting]
) -> Method:
    match = re.fullmatch(r"(.+):(\d+|auto)", name)
    kind: str = match[1] if match else name
    setting: Any = match and (match[2] if match[2] == "auto" else int(match[2]))
    *others, last = kind.split(JOINT)
    if others and last in (CHAINS, SAMPLED, TREES):
        kind, drafter = last, JOINT.join([*others, drafter or BUNDLED])
    if kind == PLAIN:
        if setting is not None:
            raise UsageError(f"Method {name!r} has a setting, and {PLAIN} drafts nothing; leave the setting away.")
        return Method(name, PLAIN, Drafting())
    if kind == TREES:
        return Method(name, drafter, drafting(block_size, tree_budget if setting is None else setting))
    chains = drafting(block_size if setting is None else setting, sampled=kind == SAMPLED)
    return Method(name, drafter if kind in (CHAINS, SAMPLED) else kind, chains)
