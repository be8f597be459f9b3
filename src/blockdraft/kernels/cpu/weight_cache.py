"""Cache of packed weights: files in the layout that compiled kernels read, written once and mapped into memory later.

A file holds the matrices of one checkpoint, loaded in one way, one behind the other; then a JSON header with the facts
that it was made from and the place of each matrix; then the header's length and digest. It is written under another
name and renamed when complete. Mapped memory is read when it is used, and processes that map the same file share it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from blockdraft.machine import cache_folder
from blockdraft.nn.packed import Kernels, PackedWeight
from blockdraft.nn.quantization import InterleavedWeight

LAYOUT = 2  # version of these files; raise it when their numbers change by code outside `MAKERS`
MAKERS = ("packed.py", "quantization.py")  # modules of nn whose code decides the numbers
SWITCH = "BLOCKDRAFT_CACHE_WEIGHTS"  # environment variable; 0 neither writes nor reads files
LEAST_BYTES = 64 << 20  # size of the smallest checkpoint whose packing takes long enough to be worth a file
ALIGNMENT = 64  # bytes
PIECES, PIECE_BYTES = 64, 64  # samples of each matrix, and of each file of a checkpoint, that are compared
LENGTH_BYTES, DIGEST_BYTES = 8, 32
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)}

# Packs the matrices of these names, which are computed as one.
Make = Callable[[Sequence[str]], PackedWeight]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Checkpoint that a cached file is made from.

    Args:
        files: Files of the checkpoint.
        options: How it is loaded, as values that JSON can hold.
    """

    files: Sequence[Path]
    options: dict[str, Any]

    def is_worth_it(self) -> bool:
        """Whether to cache the weights at all."""
        return os.environ.get(SWITCH) != "0" and sum(file.stat().st_size for file in self.files) >= LEAST_BYTES

    def path(self, kernels: Kernels) -> Path:
        """Path of the cached file: one for each checkpoint and way of loading it, so that the file of a checkpoint that
        changes is replaced."""
        facts = [[str(file.resolve()) for file in self.files], self.options, self._layout(kernels)]
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return cache_folder() / "weights" / f"{key}.weights"

    def facts(self, kernels: Kernels, products: Iterable[Sequence[str]]) -> Any:
        """Facts that decide the numbers in the file, as far as can be told without reading the whole checkpoint."""
        files = []
        for file in self.files:
            found = file.stat()
            with file.open("rb") as opened:
                sample = _sample(opened, [(0, found.st_size)])
            files.append([str(file.resolve()), found.st_size, found.st_mtime_ns, sample])
        facts = [LAYOUT, _makers(), files, self.options, self._layout(kernels), list(map(_key, products))]
        return json.loads(json.dumps(facts))  # makes them equal to those that are read from the file

    @staticmethod
    def _layout(kernels: Kernels) -> list[Any]:
        return [kernels.lanes, str(kernels.weights_dtype)]


class CachedWeights:
    """A file of packed weights, mapped into memory.

    Args:
        file: The open file; it may be closed, replaced and deleted afterwards.
        matrices: Place of each matrix, from the file's header.
        kernels: Library whose layout the matrices have.
    """

    def __init__(self, file: BinaryIO, matrices: dict[str, Any], kernels: Kernels) -> None:
        # Copy on write, so that a number changed by mistake changes for this process alone.
        self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        self._matrices, self._kernels = matrices, kernels

    def matrix(self, names: Sequence[str]) -> PackedWeight:
        """Output channels of the matrices of these names, one behind the other."""
        found = self._matrices[_key(names)]
        parts = {name: self._tensor(**part) for name, part in found["parts"].items()}
        outputs, bits = found["outputs"], found["bits"]
        if bits is None:
            return PackedWeight(self._kernels, parts["weight"], outputs, found["inputs"])
        return PackedWeight(self._kernels, InterleavedWeight.of_tensors(parts, bits, outputs), outputs, found["inputs"])

    def _tensor(self, begin: int, end: int, dtype: str, shape: list[int]) -> Tensor:
        return self._bytes[begin:end].view(DTYPES[dtype]).view(shape)


def cached_weights(
    origin: Origin, kernels: Kernels, products: Sequence[Sequence[str]], make: Make
) -> CachedWeights | None:
    """Packed weights of a checkpoint from their file, which the first call writes.

    Args:
        origin: The checkpoint.
        kernels: Library to pack for.
        products: Names of all matrices, grouped by what is computed as one.
        make: Packs one group.

    Returns:
        None where there is no file: caching is switched off, the checkpoint is too small, another process is writing
        the file, or it cannot be written, which is logged once.
    """
    try:
        if not origin.is_worth_it():
            return None
        facts, path = origin.facts(kernels, products), origin.path(kernels)
        found = _open(path, facts, kernels)
        if found is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock")
        with FileLock(lock, timeout=0):
            try:
                # Another process may have written it before the lock was ours.
                return _open(path, facts, kernels) or _write(path, facts, kernels, products, make)
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        return None
    except OSError as error:
        _tell_once(str(error.strerror or error), str(cache_folder() / "weights"))
        return None


def _write(
    path: Path, facts: Any, kernels: Kernels, products: Iterable[Sequence[str]], make: Make
) -> CachedWeights | None:
    for left in path.parent.glob(f"{path.stem}.*.partial"):  # of processes that ended, since we hold the lock
        left.unlink(missing_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("w+b") as file:
            matrices = {_key(names): _add(file, make(names)) for names in products}
            sample = _sample(file, _places(matrices))
            text = json.dumps({"facts": facts, "matrices": matrices, "sample": sample}).encode()
            file.seek(0, os.SEEK_END)
            file.write(text + len(text).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(text).digest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return _open(path, facts, kernels)


def _add(file: BinaryIO, packed: PackedWeight) -> dict[str, Any]:
    """Write a matrix at the end of a file. Returns its entry for the header."""
    data, parts = packed.data, {}
    tensors = {"weight": data} if isinstance(data, Tensor) else data.tensors()
    for name, tensor in tensors.items():
        file.write(bytes(-file.tell() % ALIGNMENT))
        begin = file.tell()
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        parts[name] = {"begin": begin, "end": file.tell(), "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    bits = None if isinstance(data, Tensor) else data.bits
    return {"parts": parts, "bits": bits, "outputs": packed.outputs, "inputs": packed.inputs}


def _open(path: Path, facts: Any, kernels: Kernels) -> CachedWeights | None:
    """The cached file, or None where it is missing, incomplete, or made from other facts."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - LENGTH_BYTES - DIGEST_BYTES
        file.seek(max(end, 0))
        length, digest = int.from_bytes(file.read(LENGTH_BYTES), "little"), file.read()
        if length > end:
            return None
        file.seek(end - length)
        text = file.read(length)
        if hashlib.sha256(text).digest() != digest:
            return None
        header = json.loads(text)
        if header["facts"] != facts or header["sample"] != _sample(file, _places(header["matrices"])):
            return None
        return CachedWeights(file, header["matrices"], kernels)
    return None


def _places(matrices: dict[str, Any]) -> list[tuple[int, int]]:
    """Byte ranges `(begin, end)` of all tensors of a file."""
    return [(part["begin"], part["end"]) for matrix in matrices.values() for part in matrix["parts"].values()]


def _sample(file: BinaryIO, places: Iterable[tuple[int, int]]) -> str:
    """Digest of samples of each byte range, its first and last bytes included."""
    digest = hashlib.sha256()
    for begin, end in places:
        last = max(end - begin - PIECE_BYTES, 0)
        for number in range(PIECES):
            file.seek(begin + last * number // (PIECES - 1))
            digest.update(file.read(min(PIECE_BYTES, end - begin)))
    return digest.hexdigest()


def _key(names: Sequence[str]) -> str:
    return " ".join(names)


@cache
def _makers() -> str:
    folder = Path(__file__).parents[2] / "nn"
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in MAKERS)).hexdigest() + version("blockdraft")


@cache
def _tell_once(reason: str, folder: str) -> None:
    log.warning(
        "Packed weights cannot be cached in %s (%s), so each start takes as long as this one; set %s=0 to stop trying.",
        folder,
        reason,
        SWITCH,
    )
