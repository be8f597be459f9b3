"""The C sources, how a compiler is called for them, and libraries made of them as they lie in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from blockdraft.cpu.library import KINDS, STORES, Library

SOURCE = Path(__file__).with_name("decoder.c")
INCLUDED = tuple(SOURCE.with_name(name) for name in ("kernels.h", "integers.h", "calls.h"))
# Sums must have the same bits wherever they are computed: nothing is fused or reordered that the source does not say.
FLAGS = ("-O2", "-ffp-contract=off", "-shared", "-fPIC")
PARALLEL = ("-fopenmp",)
VECTORS = ("-ftree-vectorize", "-fvect-cost-model=dynamic")  # of gcc, for loops that clang turns into vectors anyway
MOST_LANES = 16


def defines(weights: torch.dtype, store: torch.dtype, lanes: int, integers: bool) -> tuple[str, ...]:
    """What the sources are to be given."""
    numbers = {"WEIGHT": KINDS[weights], "STORE": STORES[store], "MOST_LANES": lanes, "INTEGERS": int(integers)}
    return tuple(f"-D{name}={number}" for name, number in numbers.items())


def command(compiler: str, out: Path, *options: str) -> list[str]:
    """That compiles the library."""
    return [compiler, *FLAGS, *options, "-o", str(out), str(SOURCE), "-lm"]


def name_of(*facts: object) -> str:
    """A name for what is compiled of these sources, under these facts."""
    return _short([*(path.read_bytes() for path in (SOURCE, *INCLUDED)), FLAGS, *facts])


def keep(path: Path, name: str) -> None:
    """Move a library to where `whole` finds it. One that was cut short would end the process when it is used, so that
    the file's name holds its digest."""
    path.replace(path.with_name(f"{name}-{_digest(path)}.so"))


def whole(folder: Path, name: str) -> Library | None:
    """The library of this name in the folder, unless it is of another version, or cut short."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if path.stem == f"{name}-{_digest(path)}":
                return Library(path)
        except (OSError, AttributeError, AssertionError):
            continue
    return None


def _short(facts: Sequence[object]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
