"""The lines that start engines with a drafter."""

from __future__ import annotations

from typing import Any

from blockdraft.drafters import as_given
from blockdraft.formats.engines import starts
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.starting import Start
from blockdraft.targets import Description


def lines_of(config: Any, layout: str, path: str, wanted: str | None, target: Description | None) -> dict[str, Start]:
    """Args:
    wanted: What the drafter's files call its target, which stands for one that is not given.
    """
    named = str(wanted or "TARGET") if target is None else target.path
    of_file = target is not None and is_gguf(named)
    engines = "TARGET" if of_file else named
    return starts(config, layout, as_given(path), engines, ["--target", named], named if of_file else None)
