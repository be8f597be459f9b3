"""Compiles `decoder.c` for this machine, once: the library is kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from functools import cache
from math import gcd
from pathlib import Path

import torch

from blockdraft.machine import cache_folder, processor
from blockdraft.nn.packed import KINDS

SOURCE = Path(__file__).with_name("decoder.c")
INCLUDED = Path(__file__).with_name("kernels.h")
COMPILERS = ("gcc", "cc", "clang")
# Sums must have the same bits wherever they are computed: nothing is fused or reordered that the source does not say.
FLAGS = ("-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
PARALLEL = ("-fopenmp",)
VECTORS = ("-ftree-vectorize", "-fvect-cost-model=dynamic")  # of gcc, for loops that clang turns into vectors anyway
ATTEMPTS = (VECTORS + PARALLEL, PARALLEL, ())  # what a compiler lacks is left away; without OpenMP there is one thread
LONGEST_SECONDS = 120.0
LONGEST_WAIT_SECONDS = 1.5  # for the compiler, where torch's operations would do
STILL_AT_WORK = "the compiler is still at work, and the next start will find its result"
MOST_LANES = 16


class Build:
    """A library that is compiled in the background, unless it is in the cache.

    Args:
        weights: Dtype of the weights: float32, bfloat16 or int8.
        store: Dtype of keys and values: float32 or bfloat16.
        head_dim: Size of a head; a multiple of 4.

    Attributes:
        reason: Why there is no library; None until this is known.
    """

    def __init__(self, weights: torch.dtype, store: torch.dtype, head_dim: int = MOST_LANES) -> None:
        lanes = gcd(head_dim, MOST_LANES)
        assert lanes >= 4, head_dim
        self.reason: str | None = None
        self._library: ctypes.CDLL | None = None
        self._defines = [f"-DWEIGHT={KINDS[weights]}", f"-DSTORE={KINDS[store]}", f"-DMOST_LANES={lanes}"]
        # Not a daemon: a process that ends before the compiler still leaves a whole library for the next one.
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def library(self, seconds: float | None = None) -> ctypes.CDLL | None:
        """The library, waited for so long at most (None: until it is there), or None."""
        self._thread.join(seconds)
        return self._library

    def _run(self) -> None:
        named = os.environ.get("CC")
        compiler = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
        if compiler is None:
            self.reason = f"there is no C compiler ({named or ', '.join(COMPILERS)})"
            return
        facts = [
            SOURCE.read_bytes(),
            INCLUDED.read_bytes(),
            compiler,
            os.stat(compiler).st_mtime,
            FLAGS,
            ATTEMPTS,
            self._defines,
            processor(),
        ]
        path = cache_folder() / "libraries" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
        try:
            self._library = _load(path) or self._compile(compiler, path)
        except (OSError, subprocess.SubprocessError) as error:
            self.reason = f"{compiler} is of no use: {error}"

    def _compile(self, compiler: str, path: Path) -> ctypes.CDLL | None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        try:
            for more in ATTEMPTS:
                command = [compiler, *FLAGS, *more, *self._defines, "-o", str(partial), str(SOURCE), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
                if done.returncode == 0:
                    partial.replace(path)
                    return _load(path)
        finally:
            partial.unlink(missing_ok=True)
        self.reason = f"{compiler} failed: {(done.stderr.strip() or 'without a message').splitlines()[0]}"
        return None


def _load(path: Path) -> ctypes.CDLL | None:
    """The library in this file; None where there is none, or one that was cut short."""
    try:
        library = ctypes.CDLL(str(path))
        library.decoder_workspace.restype = ctypes.c_int64
        library.draft_context_workspace.restype = ctypes.c_int64
        library.lanes.restype = ctypes.c_int64
        library.weight_kind.restype = ctypes.c_int64
    except (OSError, AttributeError):
        return None
    return library


@cache
def build(weights: torch.dtype, store: torch.dtype, head_dim: int = MOST_LANES) -> Build:
    """The one `Build` of this process for these arguments, begun when first asked for."""
    return Build(weights, store, head_dim)
