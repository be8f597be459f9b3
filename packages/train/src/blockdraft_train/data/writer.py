"""Writer of the data folders that `documents.py` reads, shard by shard, so that a killed process loses little."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from blockdraft.errors import UsageError
from blockdraft.folders import check_free, fingerprint, make_folder, write_file
from blockdraft_train.data.documents import (
    REASONS,
    RECORDS,
    SHARD_SECONDS,
    Document,
    TokenData,
    read_shards,
    shard_sizes,
    states_of,
)
from blockdraft_train.data.manifest import read_manifest
from blockdraft_train.data.token_data import FORMAT, MANIFEST, shard_name, token_shard

SHARD_TOKENS = 2**24


class DataWriter:
    """Writer of a data folder, which may be new, unfinished or, to be extended, finished.

    Args:
        folder: Folder of the data; `begin` makes it if it does not exist.
        identity: Everything that shapes the data, with the key `tokenizer`. A folder of the same identity is continued.

    Attributes:
        done: Numbers of the source records that need no more work.
        removed: Numbers of those that the sources no longer hold.
        supervised: Number of supervised tokens added in this run.

    Raises:
        UsageError: The folder holds data of another identity, or other files.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder / MANIFEST, FORMAT)
        if self.manifest is None:
            check_free(folder)
        known = identity if self.manifest is None else self.manifest
        for name, ours in identity.items():
            theirs = known.get(name)
            if theirs != ours:
                raise UsageError(
                    f"{folder} was made with {name} {theirs!r}, not {ours!r}; choose another folder for --out, or "
                    f"delete this one."
                )
        self._identity = identity
        self._shards = read_shards(folder)
        self._next = 1 + max((int(name[7:12]) for name in self._shards), default=-1)
        self.done = {
            record
            for shard in self._shards.values()
            for record in shard["rows"].tolist() + shard["left_out"][:, 0].tolist()
        }
        self.removed: list[int] = (self.manifest or {}).get("removed", [])
        self._keys: list[int] = []
        if (folder / RECORDS).exists():
            self._keys = load_file(folder / RECORDS)["keys"].tolist()
        self.supervised = 0
        self._clear()

    def numbers(self, keys: Iterable[int]) -> list[int]:
        """Return the numbers of the source records with these keys. A record keeps its number in later runs.

        Raises:
            UsageError: The folder holds none of these records, but others.
        """
        if self.done and not self._keys:
            raise UsageError(f"{self.folder} does not say which records it holds; choose another folder for --out.")
        known = {key: number for number, key in enumerate(self._keys)}
        numbers = [known.setdefault(key, len(known)) for key in keys]
        self._keys = list(known)
        self.removed = sorted(self.done.difference(numbers))
        if self.done and len(self.removed) == len(self.done):
            raise UsageError(
                f"{self.folder} holds {len(self.done)} records, and these sources hold none of them; choose another "
                "folder for --out, or delete this one."
            )
        return numbers

    @property
    def finished(self) -> int:
        """Number of records of the sources that need no more work."""
        return len(self.done) - len(self.removed)

    def begin(self, **facts: Any) -> None:
        """Mark the folder as unfinished, and add these facts to its manifest."""
        make_folder(self.folder)
        if self._keys:
            write_file(self.folder / RECORDS, save({"keys": torch.tensor(self._keys)}))
        if self.manifest is not None and self.removed != self.manifest.get("removed", []):
            # Documents disappear from the data or come back, so that no earlier state is a part of it.
            self.manifest |= {"fingerprint": fingerprint([self.manifest["fingerprint"], self.removed]), "states": []}
        self._record(self._chained(), finished=False, removed=self.removed, **facts)

    def add(self, record: int, documents: Sequence[Document], reason: str | None = None) -> None:
        """Add the documents of a source record.

        Args:
            record: Number of the record.
            reason: One of `REASONS` if the record has no documents.
        """
        assert (reason is None) == bool(documents)
        if reason is not None:
            self._left_out.append((record, REASONS.index(reason)))
        for document in documents:
            self._documents.append((record, document))
            self._tokens += len(document.tokens)
            self.supervised += int(document.supervised.sum())
        self.done.add(record)
        if self._tokens >= SHARD_TOKENS or time.monotonic() - self._since > SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last shard as a shard, and record it in the manifest."""
        if self._write_shard():
            self._record(self._chained(), finished=False)

    def _write_shard(self) -> bool:
        some = bool(self._documents or self._left_out)
        if some:
            records, documents = [number for number, _ in self._documents], [text for _, text in self._documents]
            shard = token_shard(
                [document.tokens for document in documents],
                [document.supervised for document in documents],
                records,
                [document.cut for document in documents],
                self._left_out,
            )
            path = self.folder / shard_name(self._next)
            write_file(path, save(shard))
            self._shards[path.name] = load_file(path)  # mapped from disk, so that memory does not fill up
            self._next += 1
        self._clear()
        return some

    def finish(self) -> dict[str, Any]:
        """Mark the folder as finished, and return its manifest. Raise UsageError if it holds no supervised token."""
        self._write_shard()
        counts = self._counts()
        if not counts["supervised"]:
            raise UsageError(
                f"None of the {counts['rows']} records has a token to learn from (left out: {counts['left_out']}); "
                f"check the records and the chat template, then delete {self.folder}."
            )
        assert self.manifest is not None
        digest = hashlib.sha256(self._identity["tokenizer"].encode())
        for document in TokenData(self.folder, self.manifest, list(self._shards.values())):
            digest.update(len(document.tokens).to_bytes(8, "little"))
            digest.update(document.tokens.int().numpy().tobytes() + document.supervised.numpy().tobytes())
        return self._record(digest.hexdigest()[:16], finished=True)

    def _counts(self) -> dict[str, Any]:
        removed = torch.tensor(self.removed, dtype=torch.int64)
        counts, reasons = Counter[str](documents=0, tokens=0, supervised=0, cut=0), Counter[int]()
        for shard in self._shards.values():
            present, left_out = ~torch.isin(shard["rows"], removed), shard["left_out"]
            reasons.update(left_out[~torch.isin(left_out[:, 0], removed), 1].tolist())
            counts["documents"] += int(present.sum())
            counts["tokens"] += int(shard["offsets"].diff()[present].sum())
            counts["cut"] += int(shard["cut"][present].sum())
            counts["supervised"] += int(shard["supervised"].sum())
            for i in (~present).nonzero().flatten().tolist():
                begin, end = shard["offsets"][i : i + 2].tolist()
                counts["supervised"] -= int(shard["supervised"][begin:end].sum())
        by_reason = {REASONS[i]: count for i, count in sorted(reasons.items())}
        return {"rows": self.finished, **counts, "left_out": by_reason}

    def _chained(self) -> str | None:
        """Return the fingerprint of an unfinished state, from that of the state before it and the shards added since.

        Reading all shards every time would take too long.
        """
        known = self.manifest or {}
        chained: str | None = known.get("fingerprint")
        for name, shard in self._shards.items():
            if name not in known.get("shards", {}):
                digest = hashlib.sha256((chained or self._identity["tokenizer"]).encode())
                for part in ("tokens", "supervised", "offsets"):
                    digest.update(shard[part].numpy().tobytes())
                chained = digest.hexdigest()[:16]
        return chained

    def _clear(self) -> None:
        self._documents: list[tuple[int, Document]] = []
        self._left_out: list[tuple[int, int]] = []
        self._tokens, self._since = 0, time.monotonic()

    def _record(self, fingerprint: str | None, finished: bool, **facts: Any) -> dict[str, Any]:
        """Write the manifest of the present state, and return it."""
        known = self.manifest or {}
        state = {"finished": finished, "fingerprint": fingerprint, "counts": self._counts()}
        shards = shard_sizes(self._shards)
        self.manifest = {"format": FORMAT} | self._identity | known | facts | state | {"shards": shards}
        self.manifest["states"] = states_of({**self.manifest, "states": states_of(known)})
        write_file(self.folder / MANIFEST, (json.dumps(self.manifest, indent=2) + "\n").encode())
        return self.manifest
