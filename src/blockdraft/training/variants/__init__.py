"""Kinds of drafters that can be trained, one a file; `base.py` says what such a file holds."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.training.variants.base import Variant


def variant_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def find_variant(name: str) -> type[Variant[Any, Any]]:
    """The variant of this file name. Raises ValueError where there is none."""
    if name not in variant_names():
        raise UsageError(f"The variant {name!r} is unknown; there are {', '.join(variant_names())}.")
    found: type[Variant[Any, Any]] = import_module(f"{__name__}.{name}").VARIANT
    return found


__all__ = ["Variant", "find_variant", "variant_names"]
