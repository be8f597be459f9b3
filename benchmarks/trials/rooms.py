"""Makes what is on trial known where drafters and variants of training are looked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

REGISTERED = str(Path(__file__).parent / "registered")
ROOMS = ("blockdraft.drafters", "blockdraft.training.variants")


@contextmanager
def with_rooms() -> Iterator[None]:
    """Within it the files of `registered/` are plug-ins of both rooms."""
    rooms = [import_module(name) for name in ROOMS]
    before = [list(room.__path__) for room in rooms]
    for room in rooms:
        room.__path__ = [*room.__path__, REGISTERED]
    try:
        yield
    finally:
        for room, path in zip(rooms, before, strict=True):
            room.__path__ = path
