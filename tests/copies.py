"""Copies of objects that differ from the original in some attributes, to pass in its place."""

import copy
from typing import Any, TypeVar

T = TypeVar("T")


def copy_with(original: T, **attributes: Any) -> T:
    """Return a shallow copy with these methods or attributes. The original does not change."""
    changed = copy.copy(original)
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed
