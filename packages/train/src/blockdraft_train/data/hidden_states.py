"""Hidden states of training data, computed once and stored on disk.

They are the outputs of the target layers. The cache is a folder of shards with a manifest, `hidden_states.json`. Shard
i is a safetensors file with the hidden states of consecutive documents, `[T, m * H]`. A shard is written atomically.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import check_free, held, make_folder, write_file
from blockdraft.targets import Target, target_fingerprint
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.manifest import read_manifest
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.target_layers import batches, check_target_layers, target_hidden_states
from blockdraft_train.data.token_data import HIDDEN_STATES_MANIFEST as MANIFEST
from blockdraft_train.data.token_data import hidden_states_name

FORMAT = 1
SHARD_BYTES = 2**28


class HiddenStates(Sequence[Tensor]):
    """Hidden states of each document of a data folder, in its order, mapped into memory. From `read_hidden_states`.

    Attributes:
        folder: Folder of the cache.
        target_layers: 0-based target layers, in the order in which their outputs are concatenated.
        target: Fingerprint of the target.
        data: Fingerprint of the data.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[Tensor]) -> None:
        self.folder = folder
        self.target_layers: tuple[int, ...] = tuple(manifest["target_layers"])
        self.target: str = manifest["target"]
        self.data: str = manifest["data"]
        self._shards = shards
        self._first: list[int] = manifest["first"]
        self._begins = [[0, *accumulate(lengths)] for lengths in manifest["lengths"]]

    def __len__(self) -> int:
        return self._first[-1] + len(self._begins[-1]) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return the hidden states `[S, m * H]` of a document, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        shard = bisect_right(self._first, index) - 1
        begins, i = self._begins[shard], index - self._first[shard]
        return self._shards[shard][begins[i] : begins[i + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return read_hidden_states, (self.folder,)  # another process maps the files itself

    def check(self, target: Target, data: TokenData, target_layers: Sequence[int]) -> None:
        """Raise UsageError unless these are hidden states of this target and data, and include these target layers."""
        theirs, ours = vars(self), _identity(target, data, target_layers)
        _check_same(self.folder, theirs, ours, ("target", "data"))
        if not set(target_layers) <= set(self.target_layers):
            _check_same(self.folder, theirs, ours, ("target_layers",))

    def of(self, index: int, target_layers: Sequence[int]) -> Tensor:
        """Return the hidden states `[S, m * H]` of a document, of these target layers in this order."""
        whole: Tensor = self[index]
        if tuple(target_layers) == self.target_layers:
            return whole
        parts = whole.chunk(len(self.target_layers), dim=-1)
        return torch.cat([parts[self.target_layers.index(layer)] for layer in target_layers], dim=-1)


def read_hidden_states(folder: str | Path) -> HiddenStates:
    """Open a cache of hidden states, which are read from disk when they are accessed.

    Raises UsageError if the folder is absent, unfinished or broken.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    if manifest is None:
        raise UsageError(f"{folder / MANIFEST} does not exist; give a folder made by `blockdraft hidden-states`.")
    shards = []
    for i, lengths in enumerate(manifest["lengths"]):
        if not _shard(folder, i).exists():
            raise UsageError(
                f"{folder} lacks {_shard(folder, i).name}; run the same `blockdraft hidden-states` command again."
            )
        shards.append(_read_shard(_shard(folder, i), lengths))
    return HiddenStates(folder, manifest, shards)


@dataclass(frozen=True)
class HiddenStateCache:
    """A cache of hidden states that is to be made or completed. From `plan_hidden_states`.

    Attributes:
        folder: Folder of the cache.
        manifest: Content of `hidden_states.json`.
        need: Number of bytes that are still to be written.
        free: Number of bytes that are free on the disk.
    """

    folder: Path
    target: Target
    data: TokenData
    settings: HiddenStateSettings
    manifest: dict[str, Any]
    need: int
    free: int

    def write(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute and write the missing shards. After an interruption, a later call resumes with the unfinished shard.

        Args:
            progress: Called with the tokens done and the tokens to do in this run.

        Raises:
            UsageError: The disk is too small or cannot be written to, or another process writes to the folder or has
                written other hidden states there since this was planned.
            NumbersError: Hidden states are not finite.
        """
        self._check_space()
        with held(self.folder, "computing hidden states"):
            now = plan_hidden_states(self.folder, self.target, self.data, self.manifest["target_layers"], self.settings)
            now._check_space()
            now._begin()
            for number, hidden_states in now._missing(progress):
                now._store(number, hidden_states)

    def write_from(self, hidden_states: Iterable[Tensor]) -> None:
        """Write all shards from the hidden states `[S, m * H]` of each document, in the order of the data."""
        self._check_space()
        with held(self.folder, "writing hidden states"):
            self._begin()
            documents = iter(hidden_states)
            for number, lengths in enumerate(self.manifest["lengths"]):
                shard = torch.cat([next(documents)[:length] for length in lengths])
                self._store(number, shard.to(getattr(torch, self.settings.dtype)))

    def in_memory(
        self, store: bool, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[HiddenStates, str | None]:
        """Return the hidden states of all documents: those of existing shards, and the missing or broken ones computed.

        Args:
            store: Whether to write the computed shards too, so that a later call finds them.
            progress: As in `write`.

        Returns:
            The hidden states, and the reason why some were not written; None if all were, or if none were to be.

        Raises:
            NumbersError: Hidden states are not finite.
        """
        shards, failure = dict[int, Tensor](), None
        for i, lengths in enumerate(self.manifest["lengths"]):
            path = _shard(self.folder, i)
            if path.exists():
                try:
                    shards[i] = _read_shard(path, lengths)
                except UsageError:  # a machine that lost its power may leave such a file
                    path.unlink()
        if store:
            try:
                self._begin()
            except UsageError as error:
                store, failure = False, str(error)
        for number, hidden_states in self._missing(progress):
            shards[number] = hidden_states
            if store:
                try:
                    self._store(number, hidden_states)
                except UsageError as error:  # those in memory suffice
                    store, failure = False, str(error)
        in_order = [shards[i] for i in range(len(self.manifest["lengths"]))]
        return HiddenStates(self.folder, self.manifest, in_order), failure

    def _check_space(self) -> None:
        if self.need > self.free:
            raise UsageError(
                f"The hidden states need {size(self.need)} and {self.folder.absolute().parent} has {size(self.free)} "
                "free; choose fewer target layers, fewer documents or another disk for --out, or train without stored "
                "hidden states."
            )

    def _begin(self) -> None:
        make_folder(self.folder)
        write_file(self.folder / MANIFEST, (json.dumps(self.manifest) + "\n").encode())

    def _store(self, number: int, hidden_states: Tensor) -> None:
        write_file(_shard(self.folder, number), save({"hidden_states": hidden_states}))

    def _missing(self, progress: Callable[[int, int], None]) -> Iterator[tuple[int, Tensor]]:
        """Compute the missing shards, and yield the number and the hidden states of each."""
        shards = list(zip(self.manifest["first"], self.manifest["lengths"], strict=True))
        missing = [i for i in range(len(shards)) if not _shard(self.folder, i).exists()]
        done, total = 0, sum(sum(shards[i][1]) for i in missing)
        for i in missing:
            hidden_states = torch.empty(sum(shards[i][1]), self.width, dtype=getattr(torch, self.settings.dtype))
            for count in self._compute(hidden_states, *shards[i]):
                done += count
                progress(done, total)
            yield i, hidden_states

    @property
    def width(self) -> int:
        """Number of values for each token, `m * H`."""
        return len(self.manifest["target_layers"]) * self.target.hidden_size

    def _compute(self, hidden_states: Tensor, first: int, lengths: list[int]) -> Iterator[int]:
        """Fill in a shard's hidden states batch by batch, and yield the number of tokens of each batch."""
        target_layers, parts = self.manifest["target_layers"], hidden_states.split(lengths)
        for group in batches(lengths, self.settings.batch_tokens):
            tokens = [self.data[first + i].tokens[: lengths[i]] for i in group]
            for i, computed in zip(group, target_hidden_states(self.target, target_layers, tokens), strict=True):
                parts[i].copy_(computed)
                if not bool(parts[i].isfinite().all()):
                    raise NumbersError(
                        f"The hidden states of document {first + i} are not finite in {self.settings.dtype}; use "
                        "another --dtype."
                    )
            yield sum(map(len, tokens))


def plan_hidden_states(
    folder: Path,
    target: Target,
    data: TokenData,
    target_layers: Sequence[int],
    settings: HiddenStateSettings,
    longest: int | None = None,
) -> HiddenStateCache:
    """Plan a cache of hidden states, or the missing part of one.

    Args:
        longest: Number of tokens to which longer documents are cut; None cuts none.

    Raises:
        UsageError: The folder holds the cache of another target, other data or target layers, or other files; or the
            target lacks a layer, or has another tokenizer than the data.
    """
    check_target_layers(target, target_layers)
    data.check_tokenizer(target.tokenizer)
    width = len(target_layers) * target.hidden_size * getattr(torch, settings.dtype).itemsize
    first, groups, shard_bytes = [0], [list[int]()], 0
    for i, whole in enumerate(data.lengths):
        length = min(whole, longest or whole)
        if groups[-1] and shard_bytes + length * width > SHARD_BYTES:
            first.append(i)
            groups.append([])
            shard_bytes = 0
        groups[-1].append(length)
        shard_bytes += length * width
    identity = _identity(target, data, target_layers) | {"dtype": settings.dtype}
    if longest is not None:
        identity["longest"] = longest
    manifest = {"format": FORMAT, **identity, "first": first, "lengths": groups}
    earlier = read_manifest(folder / MANIFEST, FORMAT)
    if earlier is not None:
        _check_same(folder, earlier, identity, tuple(identity))
        manifest = earlier
    else:
        check_free(folder)
    missing = (lengths for i, lengths in enumerate(manifest["lengths"]) if not _shard(folder, i).exists())
    disk = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    need = sum(map(sum, missing)) * width
    return HiddenStateCache(folder, target, data, settings, manifest, need, shutil.disk_usage(disk).free)


def size(count: int) -> str:
    """Format a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _shard(folder: Path, number: int) -> Path:
    return folder / hidden_states_name(number)


def _read_shard(path: Path, lengths: Sequence[int]) -> Tensor:
    try:
        hidden_states = load_file(path)["hidden_states"]
        if len(hidden_states) != sum(lengths):
            raise UsageError(f"it holds {len(hidden_states)} tokens instead of {sum(lengths)}")
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UsageError(f"{path} is broken ({error}); delete it, and run `blockdraft hidden-states` again.") from error
    return hidden_states


def _identity(target: Target, data: TokenData, target_layers: Sequence[int]) -> dict[str, Any]:
    return {"target": target_fingerprint(target), "data": data.fingerprint, "target_layers": list(target_layers)}


def _check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if (list(theirs[name]) if name == "target_layers" else theirs.get(name)) != ours[name]:
            raise UsageError(
                f"{folder} holds other hidden states: {name} {theirs.get(name)} instead of {ours[name]}. Give the "
                "target, data and target layers that they were made for, or run `blockdraft hidden-states` with "
                "another folder."
            )
