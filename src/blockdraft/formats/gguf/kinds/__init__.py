"""The kinds of drafters that llama.cpp has, a file each; `base.py` says what is in it."""

from __future__ import annotations

from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.gguf.files import GGUFFile
from blockdraft.formats.gguf.kinds.base import Kind
from blockdraft.plugins import plugins


def kinds() -> list[Kind]:
    return [module.KIND for module in plugins(__name__).values()]


def kind_of(config: Any) -> Kind:
    """The kind that a configuration belongs to. Raises UsageError where llama.cpp has none."""
    found = next((kind for kind in kinds() if type(config) in kind.configs()), None)
    if found is None:
        known = (name for kind in kinds() for name in kind.configs().values())
        raise UsageError(
            f"The kind of drafter is {type(config).__name__.removesuffix('Config')!r}; llama.cpp drafts with files of "
            f"{', '.join(known)} alone. Train one of these (`blockdraft train`), or serve it with `blockdraft serve`."
        )
    return found


def kind_in(file: GGUFFile) -> Kind:
    """The kind that a file holds. Raises UsageError where it is no drafter."""
    found = file.metadata.get("general.architecture")
    kind = next((kind for kind in kinds() if kind.architecture == found), None)
    if kind is None:
        known = " or ".join(kind.architecture for kind in kinds())
        raise UsageError(f"{file.path} is no drafter: its architecture is {found} instead of {known}.")
    return kind


__all__ = ["Kind", "kind_in", "kind_of", "kinds"]
