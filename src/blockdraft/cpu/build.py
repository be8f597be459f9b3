"""Compiles `decoder.c` for this machine, once: the library is kept in the cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import gcd
from pathlib import Path

import torch

from blockdraft.cpu.library import KINDS, STORES, Library
from blockdraft.machine import cache_folder, processor

SOURCE = Path(__file__).with_name("decoder.c")
INCLUDED = tuple(SOURCE.with_name(name) for name in ("kernels.h", "integers.h", "calls.h"))
COMPILERS = ("gcc", "cc", "clang")
# Sums must have the same bits wherever they are computed: nothing is fused or reordered that the source does not say.
FLAGS = ("-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
PARALLEL = ("-fopenmp",)
VECTORS = ("-ftree-vectorize", "-fvect-cost-model=dynamic")  # of gcc, for loops that clang turns into vectors anyway
ATTEMPTS = (VECTORS + PARALLEL, PARALLEL, ())  # what a compiler lacks is left away; without OpenMP there is one thread
LONGEST_SECONDS = 120.0
SILENT_SECONDS = 1.5  # after which whoever waits for the compiler is told why
MOST_LANES = 16


class Build:
    """A library that is compiled in the background, unless it is in the cache.

    Args:
        weights: Dtype of the weights that are not of few bits: float32 or bfloat16.
        store: Dtype of keys and values: float32, bfloat16 or int8.
        lanes: Most numbers of a vector; 4, 8 or 16.
        integers: Whether there are weights of few bits.

    Attributes:
        reason: Why there is no library; None until this is known.
    """

    def __init__(
        self, weights: torch.dtype, store: torch.dtype, head_dim: int = MOST_LANES, integers: bool = False
    ) -> None:
        lanes = gcd(head_dim, MOST_LANES)
        assert lanes >= 4, head_dim
        self.reason: str | None = None
        numbers = {"WEIGHT": KINDS[weights], "STORE": STORES[store], "MOST_LANES": lanes, "INTEGERS": int(integers)}
        self._defines = [f"-D{name}={number}" for name, number in numbers.items()]
        # Its threads are no daemons: a process that ends before the compiler still leaves a library for the next one.
        worker = ThreadPoolExecutor(1, "compiler")
        self._made = worker.submit(self._make)
        worker.shutdown(wait=False)

    def library(self) -> Library | None:
        """The library, for which this waits as long as the compiler takes, or None, and `reason` says why.

        Raises:
            AssertionError: What was compiled is not what `cpu/library.py` describes.
        """
        wait([self._made], SILENT_SECONDS)
        if not self._made.done():
            _tell_why()
        return self._made.result()

    def _make(self) -> Library | None:
        named = os.environ.get("CC")
        compiler = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
        if compiler is None:
            self.reason = f"there is no C compiler ({named or ', '.join(COMPILERS)})"
            return None
        facts = [
            *(path.read_bytes() for path in (SOURCE, *INCLUDED)),
            compiler,
            os.stat(compiler).st_mtime,
            FLAGS,
            ATTEMPTS,
            self._defines,
            processor(),
        ]
        folder, name = cache_folder() / "libraries", hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        try:
            return _whole(folder, name) or self._compile(compiler, folder, name)
        except (OSError, subprocess.SubprocessError) as error:
            self.reason = f"{compiler} is of no use: {error}"
            return None

    def _compile(self, compiler: str, folder: Path, name: str) -> Library | None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.{os.getpid()}-{threading.get_ident()}.partial"
        try:
            for more in ATTEMPTS:
                command = [compiler, *FLAGS, *more, *self._defines, "-o", str(partial), str(SOURCE), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
                if done.returncode == 0:
                    library = Library(partial)  # under this name, for the other may be that of one loaded before
                    partial.replace(folder / f"{name}-{_digest(partial)}.so")
                    return library
        finally:
            partial.unlink(missing_ok=True)
        self.reason = f"{compiler} failed: {(done.stderr.strip() or 'without a message').splitlines()[0]}"
        return None


def _whole(folder: Path, name: str) -> Library | None:
    """The library of this name in the folder, unless it is of another version. One that was cut short would end the
    process when it is used, so that the file's name holds its digest."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if path.stem == f"{name}-{_digest(path)}":
                return Library(path)
        except (OSError, AttributeError, AssertionError):
            continue
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@cache
def _tell_why() -> None:
    """Once in a process."""
    logging.getLogger(__name__).warning(
        "Compiling for this processor, once; the result is kept in %s.", cache_folder() / "libraries"
    )


def build(weights: torch.dtype, store: torch.dtype, head_dim: int = MOST_LANES, integers: bool = False) -> Build:
    """The one `Build` of this process for these arguments, begun when first asked for.

    Args:
        head_dim: Size of a head; a multiple of 4.
    """
    assert head_dim % 4 == 0, head_dim
    return begun(weights, store, gcd(head_dim, MOST_LANES), integers)


@cache
def begun(weights: torch.dtype, store: torch.dtype, lanes: int, integers: bool) -> Build:
    return Build(weights, store, lanes, integers)
