"""Stored prefixes: keys and values of long instructions, kept on disk so that the next start need not prefill them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import ParamSpec

from blockdraft.diskcache import delete_abandoned, key_of, least_used, touch, written
from blockdraft.drafters import Drafter
from blockdraft.errors import describe
from blockdraft.kernels.cpu.sources import name_of
from blockdraft.machine import cache_folder, prefixes_limit, processor
from blockdraft.targets import Target, target_fingerprint

log = logging.getLogger(__name__)

FORMAT = 2  # version of these files; raise it when the meaning of the tensors changes
REMEMBERED = 16  # instructions that came once, which are compared with later ones
STORED_TOKENS = 1024  # usual `min_tokens`: as long as these take to prefill, a user notices
TOKENS = "tokens"  # name of the tensor of token ids
SUFFIX = ".prefix"  # of files
P = ParamSpec("P")
T = TypeVar("T")


class StoredPrefix(NamedTuple):
    """A stored prefix of a prompt.

    Attributes:
        length: Its tokens that the prompt begins with.
        tensors: Its tensors by name, while they are read; None if the file is missing or invalid.
    """

    length: int
    tensors: Future[dict[str, Tensor] | None]


class PrefixStore:
    """Stores prefixes of one pair of target and drafter, a safetensors file for each.

    A background thread reads and writes the files, one after the other. Files are readable by their owner only. They
    carry a checksum; an invalid one is logged and deleted. Beyond the limit, the least recently used are deleted.
    A prefix that could not be written is not tried again.

    Of instructions, only what two of this process begin with is stored. So instructions that begin with the time of day
    write no files, and of those that end with it, the part before is stored. Prompts whose prefill was cancelled are
    stored as far as they were read.

    Args:
        min_tokens: Length of the shortest prefix that is stored, and tokens by which another must be longer.
        limit: Maximum bytes of all stored prefixes; None is `prefixes_limit`.
    """

    def __init__(
        self, target: Target, drafter: Drafter, min_tokens: int = STORED_TOKENS, limit: int | None = None
    ) -> None:
        self.min_tokens = min_tokens
        self._folder, self._limit = cache_folder() / "prefixes", prefixes_limit() if limit is None else limit
        self._facts, self._whole_only = _facts(target, drafter), not target.can_truncate
        self._key = key_of(self._facts)
        self._thread, self._process = _new_thread(), os.getpid()
        self._tokens: dict[Path, list[int]] = {}  # of each file of this pair, those being written included
        self._failed = set[Path]()  # files that could not be written
        self._seen = deque[Sequence[int]](maxlen=REMEMBERED)  # instructions that are not stored
        delete_abandoned(self._folder)
        for path in sorted(self._folder.glob(f"{self._key}-*{SUFFIX}")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._check_facts(file.metadata())
                    self._tokens[path] = file.get_tensor(TOKENS).tolist()
            except (OSError, ValueError, SafetensorError) as error:
                self._drop(path, error)

    @staticmethod
    def supports(target: Target, drafter: Drafter) -> bool:
        """Return whether prefixes of this pair can be stored: both run on a CPU, and states can be copied."""
        copies = target.can_truncate or target.keeps_checkpoints
        return target.device.type == "cpu" and copies and target.backend in ("native", "hf")

    def longest(self, tokens: Sequence[int]) -> tuple[int, Path] | None:
        """Return the length of the longest stored prefix of these tokens, and its file."""
        lengths = [(common_length(stored, tokens), path) for path, stored in list(self._tokens.items())]
        if self._whole_only:
            lengths = [(length, path) for length, path in lengths if length == len(self._tokens[path])]
        return max(lengths, default=None)

    def length_to_store(self, tokens: Sequence[int]) -> int:
        """Return how many of an instruction's tokens to store now, and remember it; 0 to store none.

        An earlier instruction began with as many, and at least `min_tokens` of them are not stored.
        """
        if not self.is_new(tokens):
            return 0
        length = max((common_length(seen, tokens) for seen in self._seen), default=0)
        if length < len(tokens):
            self._seen.append(tokens)
        return length if self.is_new(tokens[:length]) else 0

    def is_new(self, tokens: Sequence[int]) -> bool:
        """Return whether at least `min_tokens` of these tokens are not stored, and it is worth trying to store them."""
        longest = self.longest(tokens)
        known = longest[0] if longest else 0
        return len(tokens) - known >= self.min_tokens and self._path(tokens) not in self._failed

    def read(self, path: Path) -> Future[dict[str, Tensor] | None]:
        """Begin to read a file. The result is None if it is missing or invalid."""
        try:
            return self._submit(self._read, path)
        except RuntimeError:  # the process is exiting
            nothing = Future[dict[str, Tensor] | None]()
            nothing.set_result(None)
            return nothing

    def write(self, tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Begin to store a prefix. A file that cannot be written is logged.

        Args:
            tensors: Its tensors by name, contiguous, which nobody changes any more.
        """
        path = self._path(tokens)
        self._tokens[path] = list(tokens)
        with suppress(RuntimeError):  # the process is exiting
            self._submit(self._write, path, {**tensors, TOKENS: torch.tensor(tokens, dtype=torch.int32)})

    def close(self) -> None:
        """Wait until all files are written."""
        self._thread.shutdown()

    def _submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._process != os.getpid():  # threads do not survive a fork
            self._thread, self._process = _new_thread(), os.getpid()
        return self._thread.submit(work, *args, **kwargs)

    def _path(self, tokens: Sequence[int]) -> Path:
        name = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
        return self._folder / f"{self._key}-{name}{SUFFIX}"

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        began = time.perf_counter()
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            self._check_facts(metadata)
            tensors = load_file(path)
            if metadata.get("digest") != _digest(tensors):
                raise ValueError("its checksum does not match")
            if tensors.pop(TOKENS).tolist() != self._tokens.get(path):
                raise ValueError("it holds other tokens")
            touch(path)
        except Exception as error:
            self._drop(path, error)
            return None
        log.info("Read a stored prefix of %d tokens in %.2f s.", len(self._tokens[path]), time.perf_counter() - began)
        return tensors

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            if size > self._limit:
                raise ValueError(f"it takes {size / 1e9:.1f} GB, and the limit is {self._limit / 1e9:.1f} GB")
            with written(path) as partial:
                save_file(tensors, partial, {"facts": self._facts, "digest": _digest(tensors)})
                partial.chmod(0o600)  # it may be another file now
            for other, tokens in list(self._tokens.items()):  # the new one replaces those that it begins with
                if other != path and common_length(tokens, self._tokens[path]) == len(tokens):
                    self._forget(other)
            for unused in least_used(self._folder, f"*{SUFFIX}", self._limit, keep=(path,)):  # of all pairs
                self._forget(unused)
        except Exception as error:
            self._tokens.pop(path, None)
            self._failed.add(path)
            log.warning("The prefix of a prompt cannot be stored in %s: %s.", self._folder, describe(error))

    def _check_facts(self, metadata: Mapping[str, str] | None) -> None:
        if (metadata or {}).get("facts") != self._facts:
            raise ValueError("it belongs to another model, machine or version")

    def _drop(self, path: Path, error: Exception) -> None:
        """Use a file no more. Delete it if it is invalid."""
        self._tokens.pop(path, None)
        if isinstance(error, ValueError | SafetensorError):
            log.warning("The stored prefix %s cannot be used and is deleted: %s.", path, describe(error))
            self._forget(path)
        elif not isinstance(error, FileNotFoundError):  # another process may have deleted it
            log.warning("The stored prefix %s cannot be read: %s.", path, describe(error))

    def _forget(self, path: Path) -> None:
        self._tokens.pop(path, None)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "blockdraft-prefixes")


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _facts(target: Target, drafter: Drafter) -> str:
    """Return all that decides the bits of stored tensors, as text."""
    facts = [
        *(FORMAT, version("blockdraft"), torch.__version__, processor(), name_of()),
        *(target.backend, target.running, str(target.dtype), target.architecture),
        *(target.source_fingerprint or target_fingerprint(target), _files(target.path)),
    ]
    for part in drafter.parts:
        kind = [part.kind, part.bits, part.draft_vocab, part.compile_reason]
        facts.append([*kind, _files(part.path)])
    return json.dumps(facts, sort_keys=True, default=str)


def _files(path: Path | None) -> list[list[object]]:
    """Return names, sizes and dates of the files of a model."""
    if path is None or not path.exists():
        return [[str(path)]]
    files = sorted(chain([path], path.iterdir() if path.is_dir() else ()))
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
