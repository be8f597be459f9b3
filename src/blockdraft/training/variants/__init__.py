"""Kinds of drafters that can be trained, one a file; `base.py` says what such a file holds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.plugins import plugin_names
from blockdraft.training.variants.base import Variant


def variant_names() -> list[str]:
    return plugin_names(__name__)


def find_variant(name: str) -> type[Variant[Any, Any, Any]]:
    """The variant of this file name. Raises ValueError where there is none."""
    if name not in variant_names():
        raise UsageError(f"The variant {name!r} is unknown; there are {', '.join(variant_names())}.")
    found: type[Variant[Any, Any, Any]] = import_module(f"{__name__}.{name}").VARIANT
    return found


__all__ = ["Variant", "find_variant", "variant_names"]
