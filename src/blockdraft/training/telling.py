"""Whom a run tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Telling:
    """Whom a run tells how far it is; only the main process tells anything.

    Attributes:
        progress: Called with the present stage, what is done and what there is to do.
        note: Called with a sentence that should stay on the screen.
    """

    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    note: Callable[[str], None] = lambda text: None
