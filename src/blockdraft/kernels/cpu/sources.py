"""The C sources, the compiler's command line, and the files of compiled libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from blockdraft.kernels.cpu.library import KINDS, STORES, Library

SOURCE = Path(__file__).with_name("decoder.c")
HEADERS = (
    "attention.h",
    "kernels.h",
    "integers.h",
    "deltanet.h",
    "experts.h",
    "latent.h",
    "shortconv.h",
    "calls.h",
    "pool.h",
    "pack.h",
)
INCLUDED = tuple(SOURCE.with_name(name) for name in HEADERS)
# Sums must have the same bits on all machines, so the compiler may fuse and reorder nothing.
FLAGS = ("-O2", "-ffp-contract=off", "-shared", "-fPIC")
PARALLEL = ("-pthread", "-DPARALLEL")
VECTORS = ("-ftree-vectorize", "-fvect-cost-model=dynamic")  # for gcc; clang vectorises these loops anyway
MAX_LANES = 16  # numbers of the widest vector


def defines(weights: torch.dtype, inputs: torch.dtype, store: torch.dtype, lanes: int, integers: bool) -> list[str]:
    """Return the options that define the macros of the sources."""
    narrow = inputs == torch.bfloat16
    assert not narrow or weights == inputs, weights
    numbers = {"WEIGHT": KINDS[weights], "NARROW": int(narrow), "STORE": STORES[store]}
    numbers |= {"MAX_LANES": lanes, "INTEGERS": int(integers)}
    return [f"-D{name}={number}" for name, number in numbers.items()]


def command(compiler: str, out: Path, *options: str) -> list[str]:
    """Return the command line that compiles the library."""
    return [compiler, *FLAGS, *options, "-o", str(out), str(SOURCE), "-lm"]


def name_of(*facts: object) -> str:
    """Return the name of a library that is compiled from the present sources under these facts."""
    return _short([*(path.read_bytes() for path in (SOURCE, *INCLUDED)), FLAGS, *facts])


def keep(path: Path, name: str) -> None:
    """Rename a library so that `whole` finds it.

    The name holds its digest, because an incomplete library would crash the process.
    """
    path.replace(path.with_name(f"{name}-{_digest(path)}.so"))


def whole(folder: Path, name: str) -> Library | None:
    """Load the library of this name in a folder. Return None if it is missing, incomplete, or of another version."""
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
