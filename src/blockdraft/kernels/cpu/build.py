"""Builds the library for this machine: takes it from the wheel, or compiles `decoder.c` once into the cache folder."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import torch
from filelock import FileLock

from blockdraft.kernels.cpu import prebuilt
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.sources import MAX_LANES, PARALLEL, VECTORS, command, defines, keep, name_of, whole
from blockdraft.machine import cache_folder, processor, processor_flags

log = logging.getLogger(__name__)

COMPILERS = ("gcc", "cc", "clang")
NATIVE = "-march=native"
ATTEMPTS = (VECTORS + PARALLEL, PARALLEL, ())  # a compiler may lack options; the last has one thread
LONGEST_SECONDS = 600.0  # of the compiler
SILENT_SECONDS = 1.5  # wait before a message is logged
LOGGING = threading.Lock()  # lets only one thread log the message


class Build:
    """Gets a library in a background thread: from the wheel, from the cache folder, or from the compiler.

    Args:
        weights: Dtype of unquantized weights: float32 or bfloat16.
        inputs: Dtype to which their inputs are rounded: float32, or bfloat16 with bfloat16 weights.
        store: Dtype of keys and values: float32, bfloat16 or int8.
        lanes: Maximum numbers per vector: 4, 8 or 16.
        integers: Whether there are quantized weights.

    Attributes:
        reason: Reason why there is no library; None while unknown.
        level: Processor level of a library from the wheel; None for other libraries, and while unknown.
    """

    def __init__(
        self,
        weights: torch.dtype,
        inputs: torch.dtype,
        store: torch.dtype,
        lanes: int = MAX_LANES,
        integers: bool = False,
    ) -> None:
        self.reason: str | None = None
        self.level: str | None = None
        self._kinds = weights, inputs, store, lanes
        self._defines = defines(weights, inputs, store, min(lanes, _vector_lanes()), integers)
        # Not a daemon thread: a process that ends before the compiler still leaves a library for the next one.
        worker = ThreadPoolExecutor(1, "compiler")
        self._made = worker.submit(self._make)
        worker.shutdown(wait=False)

    def library(self) -> Library | None:
        """Return the library after waiting for the compiler, or None and set `reason`.

        Raises:
            AssertionError: The structs of the library differ from those of `kernels/cpu/library.py`.
        """
        wait([self._made], SILENT_SECONDS)
        if not self._made.done():
            with LOGGING:
                log_compiling()
        return self._made.result()

    def _make(self) -> Library | None:
        ready = prebuilt.find(*self._kinds)
        if ready is not None:
            library, self.level = ready
            return library
        named = os.environ.get("CC")
        compiler = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
        if compiler is None:
            self.reason = f"there is no C compiler ({named or ', '.join(COMPILERS)})"
            return None
        facts = [compiler, os.stat(compiler).st_mtime, NATIVE, ATTEMPTS, self._defines, processor()]
        folder, name = cache_folder() / "libraries", name_of(*facts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            log.warning(
                "%s cannot be written (%s), so each start compiles anew. Set BLOCKDRAFT_CACHE to another folder.",
                *(folder, error.strerror),
            )
            with TemporaryDirectory() as temporary:
                return self._try(compiler, Path(temporary), name)
        return self._try(compiler, folder, name)

    def _try(self, compiler: str, folder: Path, name: str) -> Library | None:
        """Return the library in a folder, or compile it there. Of processes that begin at once, one compiles."""
        lock = folder / f"{name}.lock"
        try:
            with FileLock(lock):
                return whole(folder, name) or self._compile(compiler, folder, name)
        except (OSError, subprocess.SubprocessError) as error:
            self.reason = f"{compiler} cannot compile in {folder}: {error}"
            return None
        finally:
            lock.unlink(missing_ok=True)

    def _compile(self, compiler: str, folder: Path, name: str) -> Library | None:
        partial = folder / f"{name}.{os.getpid()}-{threading.get_ident()}.partial"
        try:
            for more in ATTEMPTS:
                call = command(compiler, partial, NATIVE, *more, *self._defines)
                done = subprocess.run(call, capture_output=True, text=True, timeout=LONGEST_SECONDS)
                if done.returncode == 0:
                    library = Library(partial)  # under this name, because one of the final name may be loaded already
                    keep(partial, name)
                    return library
        finally:
            partial.unlink(missing_ok=True)
        self.reason = f"{compiler} failed: {(done.stderr.strip() or 'without a message').splitlines()[0]}"
        return None


def _vector_lanes() -> int:
    """Return how many numbers this processor's vectors hold. A larger maximum compiles to the same library."""
    flags = processor_flags()
    if not flags or "avx512f" in flags:
        return MAX_LANES
    return 8 if "avx" in flags else 4


@cache
def log_compiling() -> None:
    """Log once per process why the program waits."""
    log.warning(
        "Compiling for this processor, once for these dtypes; the result is kept in %s.", cache_folder() / "libraries"
    )


def build(
    weights: torch.dtype,
    store: torch.dtype,
    head_dim: int = MAX_LANES,
    integers: bool = False,
    inputs: torch.dtype = torch.float32,
) -> Build:
    """Return this process's `Build` for these arguments. The first call starts it.

    Args:
        weights, store, integers, inputs: As in `Build`.
        head_dim: Size of an attention head, a multiple of 4.
    """
    assert head_dim % 4 == 0, head_dim
    narrow = inputs == torch.bfloat16  # target and drafter share a library, even if only the drafter is quantized
    return begun(weights, inputs, store, gcd(head_dim, MAX_LANES), integers or narrow)


@cache
def begun(weights: torch.dtype, inputs: torch.dtype, store: torch.dtype, lanes: int, integers: bool) -> Build:
    return Build(weights, inputs, store, lanes, integers)
