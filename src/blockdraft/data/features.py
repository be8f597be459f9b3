"""Features of training data, that is the outputs of the target's tapped layers, computed once and kept on disk.

A feature cache is a folder of shards with a manifest, `features.json`. Shard i is a safetensors file with the features
of consecutive documents one after the other, `[T, m * H]`; it appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.data.folder import check_free, make_folder, read_manifest, write_file
from blockdraft.data.settings import FeatureSettings
from blockdraft.data.taps import batches, check_taps, tapped_features
from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import held
from blockdraft.targets import Target, target_fingerprint

FORMAT = 1
MANIFEST = "features.json"
SHARD_BYTES = 2**28


class Features(Sequence[Tensor]):
    """Features of each document of a data folder, in its order, mapped into memory. From `read_features`.

    Attributes:
        folder: Folder of the cache.
        taps: 0-based target layers, in the order in which their outputs lie side by side.
        target: Fingerprint of the target.
        data: Fingerprint of the data.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[Tensor]) -> None:
        self.folder = folder
        self.taps: tuple[int, ...] = tuple(manifest["taps"])
        self.target: str = manifest["target"]
        self.data: str = manifest["data"]
        self._shards = shards
        self._first: list[int] = manifest["first"]
        self._begins = [[0, *accumulate(lengths)] for lengths in manifest["lengths"]]

    def __len__(self) -> int:
        return self._first[-1] + len(self._begins[-1]) - 1

    def __getitem__(self, index: Any) -> Any:
        """Features `[S, m * H]` of a document, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        shard = bisect_right(self._first, index) - 1
        begins, i = self._begins[shard], index - self._first[shard]
        return self._shards[shard][begins[i] : begins[i + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return read_features, (self.folder,)  # another process maps the files by itself

    def check(self, target: Target, data: TokenData, taps: Sequence[int]) -> None:
        """Check that these are features of this target and these data, with these taps among theirs.

        Raises:
            UsageError: They are not.
        """
        theirs, ours = vars(self), _identity(target, data, taps)
        _check_same(self.folder, theirs, ours, ("target", "data"))
        if not set(taps) <= set(self.taps):
            _check_same(self.folder, theirs, ours, ("taps",))

    def of(self, index: int, taps: Sequence[int]) -> Tensor:
        """Features `[S, m * H]` of a document, of some of the stored taps, in the order given."""
        whole: Tensor = self[index]
        if tuple(taps) == self.taps:
            return whole
        parts = whole.chunk(len(self.taps), dim=-1)
        return torch.cat([parts[self.taps.index(tap)] for tap in taps], dim=-1)


def read_features(folder: str | Path) -> Features:
    """Open a feature cache. Features are read from disk when they are accessed.

    Raises:
        UsageError: The folder is absent, unfinished or broken.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    if manifest is None:
        raise UsageError(f"{folder / MANIFEST} does not exist; give a folder made by `blockdraft features`.")
    shards = []
    for i, lengths in enumerate(manifest["lengths"]):
        if not _shard(folder, i).exists():
            raise UsageError(
                f"{folder} lacks {_shard(folder, i).name}; run the `blockdraft features` command that began it again."
            )
        shards.append(_read_shard(_shard(folder, i), lengths))
    return Features(folder, manifest, shards)


@dataclass(frozen=True)
class FeatureCache:
    """A feature cache that is to be made or completed. From `plan_features`.

    Attributes:
        folder: Folder of the cache.
        manifest: Content of `features.json`.
        need: Number of bytes that are still to be written.
        free: Number of bytes that are free on the disk.
    """

    folder: Path
    target: Target
    data: TokenData
    settings: FeatureSettings
    manifest: dict[str, Any]
    need: int
    free: int

    def write(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute and write the missing shards. A later call goes on with the shard at which this one was interrupted.

        Args:
            progress: Called with the tokens done and the tokens to do in this run.

        Raises:
            UsageError: The disk is too small or cannot be written to, or another process writes to the folder or has
                written other features there since this was planned.
            NumbersError: Features are not finite.
        """
        self._check_space()
        with held(self.folder, "computing features"):
            now = plan_features(self.folder, self.target, self.data, self.manifest["taps"], self.settings)
            now._check_space()
            now._begin()
            for number, features in now._missing(progress):
                now._store(number, features)

    def in_memory(
        self, store: bool, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[Features, str | None]:
        """Features of all documents, from the shards that exist, and computed where they are missing or broken.

        Args:
            store: Whether to write the computed shards too, so that a later call finds them.
            progress: As in `write`.

        Returns:
            The features, and the reason why some were not written; None if all were, or if none were to be.

        Raises:
            NumbersError: Features are not finite.
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
        for number, features in self._missing(progress):
            shards[number] = features
            if store:
                try:
                    self._store(number, features)
                except UsageError as error:  # the features in memory suffice
                    store, failure = False, str(error)
        found = [shards[i] for i in range(len(self.manifest["lengths"]))]
        return Features(self.folder, self.manifest, found), failure

    def _check_space(self) -> None:
        if self.need > self.free:
            raise UsageError(
                f"The features need {size(self.need)} and {self.folder.absolute().parent} has {size(self.free)} free; "
                f"choose fewer taps, fewer documents or another disk for --out, or train without a feature cache."
            )

    def _begin(self) -> None:
        make_folder(self.folder)
        write_file(self.folder / MANIFEST, (json.dumps(self.manifest) + "\n").encode())

    def _store(self, number: int, features: Tensor) -> None:
        write_file(_shard(self.folder, number), save({"features": features}))

    def _missing(self, progress: Callable[[int, int], None]) -> Iterator[tuple[int, Tensor]]:
        """Compute the missing shards, and yield the number and the features of each."""
        shards = list(zip(self.manifest["first"], self.manifest["lengths"], strict=True))
        missing = [i for i in range(len(shards)) if not _shard(self.folder, i).exists()]
        done, total = 0, sum(sum(shards[i][1]) for i in missing)
        for i in missing:
            features = torch.empty(sum(shards[i][1]), self.width, dtype=getattr(torch, self.settings.dtype))
            for count in self._compute(features, *shards[i]):
                done += count
                progress(done, total)
            yield i, features

    @property
    def width(self) -> int:
        """Number of values for each token, `m * H`."""
        return len(self.manifest["taps"]) * self.target.hidden_size

    def _compute(self, features: Tensor, first: int, lengths: list[int]) -> Iterator[int]:
        """Fill in a shard's features batch by batch, and yield the number of tokens of each batch."""
        taps, parts = self.manifest["taps"], features.split(lengths)
        for group in batches(lengths, self.settings.batch_tokens):
            tokens = [self.data[first + i].tokens[: lengths[i]] for i in group]
            for i, found in zip(group, tapped_features(self.target, taps, tokens), strict=True):
                parts[i].copy_(found)
                if not bool(parts[i].isfinite().all()):
                    raise NumbersError(
                        f"The features of document {first + i} are not finite in {self.settings.dtype}; "
                        f"use another --dtype."
                    )
            yield sum(map(len, tokens))


def plan_features(
    folder: Path,
    target: Target,
    data: TokenData,
    taps: Sequence[int],
    settings: FeatureSettings,
    longest: int | None = None,
) -> FeatureCache:
    """Plan a feature cache, or the missing part of one.

    Args:
        longest: Number of tokens to which longer documents are cut; None cuts none.

    Raises:
        UsageError: The folder holds the cache of another target, other data or taps, or other files; or the target
            lacks a layer, or has another tokenizer than the data.
    """
    check_taps(target, taps)
    data.check_tokenizer(target.tokenizer)
    width = len(taps) * target.hidden_size * getattr(torch, settings.dtype).itemsize
    first, groups, held = [0], [list[int]()], 0
    for i, whole in enumerate(data.lengths):
        length = min(whole, longest or whole)
        if groups[-1] and held + length * width > SHARD_BYTES:
            first.append(i)
            groups.append([])
            held = 0
        groups[-1].append(length)
        held += length * width
    identity = _identity(target, data, taps) | {"dtype": settings.dtype}
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
    return FeatureCache(folder, target, data, settings, manifest, need, shutil.disk_usage(disk).free)


def size(count: int) -> str:
    """Number of bytes, for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05}.safetensors"


def _read_shard(path: Path, lengths: Sequence[int]) -> Tensor:
    try:
        features = load_file(path)["features"]
        if len(features) != sum(lengths):
            raise UsageError(f"it holds {len(features)} tokens instead of {sum(lengths)}")
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UsageError(f"{path} is broken ({error}); delete it, and run `blockdraft features` again.") from error
    return features


def _identity(target: Target, data: TokenData, taps: Sequence[int]) -> dict[str, Any]:
    return {"target": target_fingerprint(target), "data": data.fingerprint, "taps": list(taps)}


def _check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if (list(theirs[name]) if name == "taps" else theirs.get(name)) != ours[name]:
            raise UsageError(
                f"{folder} holds other features: {name} {theirs.get(name)} instead of {ours[name]}. Give the target, "
                "data and taps that they were made for, or make new ones with `blockdraft features` in another folder."
            )
