"""Cache of packed weights: files in the layout that compiled kernels read, written once and then memory-mapped.

A file holds the matrices of one checkpoint, loaded with one set of options. A JSON header with the facts that decide
the numbers and the place of each matrix follows, then the header's length and digest. A file is written under another
name and renamed when complete. Mapped memory is read on use, and processes that map the same file share it. Whoever
writes a file deletes the least recently used ones beyond the limit that `blockdraft cache limit` shows and sets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from blockdraft.diskcache import code_key, delete_abandoned, key_of, least_used, touch, written
from blockdraft.machine import cache_folder, weights_limit
from blockdraft.nn.packed import Kernels, PackedWeight
from blockdraft.nn.quantization import InterleavedWeight

LAYOUT = 4  # version of these files; raise it when code outside of `MAKERS` changes their numbers
MAKERS = ("nn", "formats", "kernels/cpu", "targets")  # folders with the code that decides the numbers
SWITCH = "BLOCKDRAFT_CACHE_WEIGHTS"  # environment variable; 0 disables the cache
MIN_BYTES = 64 << 20  # smallest checkpoint to cache; smaller ones are packed quickly
LOG_SECONDS = 10  # between reports of progress
ALIGNMENT = 64  # bytes
PIECES, PIECE_BYTES = 64, 64  # samples to compare of each matrix, and of each file of a checkpoint
LENGTH_BYTES, DIGEST_BYTES = 8, 32
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)}

# Packs the matrices of these names into one.
Make = Callable[[Sequence[str]], PackedWeight]
log = logging.getLogger(__name__)
_opened = set[Path]()  # cached files that this process has mapped


@dataclass(frozen=True)
class Origin:
    """Checkpoint of a cached file.

    Args:
        files: Files of the checkpoint.
        options: How it is loaded, as values that JSON can hold.
    """

    files: Sequence[Path]
    options: dict[str, Any]

    def is_worth_it(self) -> bool:
        """Return whether to cache the weights."""
        return os.environ.get(SWITCH) != "0" and sum(file.stat().st_size for file in self.files) >= MIN_BYTES

    def path(self, kernels: Kernels) -> Path:
        """Return the path of the cached file, one for each checkpoint and set of options.

        If the checkpoint changes, its file is replaced.
        """
        facts = [[str(file.resolve()) for file in self.files], self.options, self._layout(kernels)]
        return cache_folder() / "weights" / f"{key_of(*facts)}.weights"

    def facts(self, kernels: Kernels, products: Iterable[Sequence[str]]) -> Any:
        """Return the facts that decide the numbers in the file, without reading the whole checkpoint."""
        files = []
        for file in self.files:
            status = file.stat()
            with file.open("rb") as opened:
                sample = _sample(opened, [(0, status.st_size)])
            files.append([str(file.resolve()), status.st_size, status.st_mtime_ns, sample])
        facts = [LAYOUT, code_key(*MAKERS), files, self.options, self._layout(kernels), list(map(_key, products))]
        return json.loads(json.dumps(facts))  # equal to those read from a file

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
        # Copy on write, so that a mistaken change stays in this process.
        self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        self._matrices, self._kernels = matrices, kernels

    def matrix(self, names: Sequence[str]) -> PackedWeight:
        """Return the matrices of these names, concatenated along the output dimension."""
        entry = self._matrices[_key(names)]
        parts = {name: self._tensor(**part) for name, part in entry["parts"].items()}
        outputs, bits = entry["outputs"], entry["bits"]
        if bits is None:
            return PackedWeight(self._kernels, parts["weight"], outputs, entry["inputs"])
        data = InterleavedWeight.of_tensors(parts, bits, outputs, entry["floating"])
        return PackedWeight(self._kernels, data, outputs, entry["inputs"])

    def _tensor(self, begin: int, end: int, dtype: str, shape: list[int]) -> Tensor:
        return self._bytes[begin:end].view(DTYPES[dtype]).view(shape)


def cached_weights(
    origin: Origin, kernels: Kernels, products: Sequence[Sequence[str]], make: Make
) -> CachedWeights | None:
    """Return the packed weights of a checkpoint from their file, which the first call writes.

    Args:
        origin: The checkpoint.
        kernels: Library to pack for.
        products: Names of all matrices, grouped by matrix product.
        make: Packs one group.

    Returns:
        None without a file: the cache is disabled, the checkpoint is too small, another process is writing the file,
        or it cannot be written, which is logged once.
    """
    try:
        if not origin.is_worth_it():
            return None
        facts, path = origin.facts(kernels, products), origin.path(kernels)
        cached = _open(path, facts, kernels)
        if cached is not None:
            return cached
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock")
        with FileLock(lock, timeout=0):
            try:
                # Another process may have written it before we got the lock.
                return _open(path, facts, kernels) or _write(path, facts, kernels, products, make)
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        return None
    except OSError as error:
        tell_once(str(error.strerror or error), str(cache_folder() / "weights"))
        return None


def _write(
    path: Path, facts: Any, kernels: Kernels, products: Sequence[Sequence[str]], make: Make
) -> CachedWeights | None:
    delete_abandoned(path.parent, f"{path.stem}.", seconds=0)  # of ended processes, since we hold the lock
    with written(path) as partial, partial.open("w+b") as file:
        matrices, logged = {}, time.monotonic()
        for number, names in enumerate(products):
            matrices[_key(names)] = _add(file, make(names))
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                done = 100 * (number + 1) // len(products)
                log.warning("Packing the weights for this processor, once for this model: %d %% done.", done)
        sample = _sample(file, _places(matrices))
        text = json.dumps({"facts": facts, "matrices": matrices, "sample": sample}).encode()
        file.seek(0, os.SEEK_END)
        file.write(text + len(text).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(text).digest())
        file.flush()
        os.fsync(file.fileno())
    weights = _open(path, facts, kernels)
    for unused in least_used(path.parent, "*.weights", weights_limit(), keep=_opened):
        with suppress(OSError):  # another process may delete the same files
            unused.unlink()
    return weights


def _add(file: BinaryIO, packed: PackedWeight) -> dict[str, Any]:
    """Append a matrix to a file, and return its entry for the header."""
    data, parts = packed.data, {}
    tensors = {"weight": data} if isinstance(data, Tensor) else data.tensors()
    for name, tensor in tensors.items():
        file.write(bytes(-file.tell() % ALIGNMENT))
        begin = file.tell()
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        parts[name] = {"begin": begin, "end": file.tell(), "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    bits, floating = (None, False) if isinstance(data, Tensor) else (data.bits, data.floating)
    sizes = {"outputs": packed.outputs, "inputs": packed.inputs}
    return {"parts": parts, "bits": bits, "floating": floating, **sizes}


def _open(path: Path, facts: Any, kernels: Kernels) -> CachedWeights | None:
    """Open the cached file. Return None if it is missing, incomplete, or made from other facts."""
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
        touch(path)
        _opened.add(path)
        return CachedWeights(file, header["matrices"], kernels)
    return None


def _places(matrices: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the byte ranges `(begin, end)` of all tensors of a file."""
    return [(part["begin"], part["end"]) for matrix in matrices.values() for part in matrix["parts"].values()]


def _sample(file: BinaryIO, places: Iterable[tuple[int, int]]) -> str:
    """Return a digest of samples of each byte range, including its first and last bytes."""
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
def tell_once(reason: str, folder: str) -> None:
    log.warning(
        "Packed weights cannot be cached in %s (%s), so each start takes as long as this one; set %s=0 to stop trying.",
        folder,
        reason,
        SWITCH,
    )
