"""Training data on disk: shards of tokens, mapped into memory when read, and their manifest `data.json`.

A shard is a safetensors file that appears whole or not at all. It holds the documents of some source rows, and says
which rows these are and which were left out; so it records both the data and how far their making is.

    tokens, supervised   [T]      all documents one behind the other, int32 and bool
    offsets              [D + 1]  where each document begins, and the end
    rows, cut            [D]      the source row of each document; whether it was cut to the longest length allowed
    left_out             [K, 2]   rows that gave no document, and why: an index into `REASONS`

Each state that the folder has been in, one a shard and one whenever it was finished, has a fingerprint. The manifest
keeps them with their counts, so that who has read an earlier one can tell how much has come since.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockdraft.data.folder import check_free, fingerprint, make_folder, read_manifest, write_file
from blockdraft.errors import UsageError

FORMAT = 1
MANIFEST = "data.json"
LOOPS = "answer loops"
REASONS = ("no supervised token", LOOPS, "prompt too long")
SHARD_TOKENS = 2**24
SHARD_SECONDS = 120.0  # of work that a killed process loses at most


@dataclass(frozen=True)
class Document:
    """One conversation or text.

    Attributes:
        tokens: `[S]` int64.
        supervised: `[S]` bool; tokens that the drafter may learn to guess.
        cut: Whether it goes on in its source past the longest length allowed.
    """

    tokens: Tensor
    supervised: Tensor
    cut: bool = False


class TokenData(Sequence[Document]):
    """The documents of a data folder, in the order of their source, as they were when it was opened. From `read_data`.

    Attributes:
        folder: Where they lie.
        fingerprint: Of the documents and the tokenizer; the same whatever the shards are, if the data are finished.
        finished: Whether they are; else these are the documents of the shards there were.
        tokenizer: Fingerprint of the tokenizer that made the tokens; see `tokenizer_fingerprint`.
        lengths: Tokens of each document.
        manifest: What `data.json` holds.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[dict[str, Tensor]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint: str = manifest["fingerprint"] or ""
        self.finished: bool = manifest["finished"]
        self.tokenizer: str = manifest["tokenizer"]
        self._shards = shards
        # Rows come to an end in another order than they began in where the target answers many at a time.
        rows = torch.cat([shard["rows"] for shard in shards] or [torch.zeros(0, dtype=torch.int64)])
        places = [(number, i) for number, shard in enumerate(shards) for i in range(len(shard["rows"]))]
        self._places = [places[i] for i in rows.argsort(stable=True).tolist()]
        lengths = [shard["offsets"].diff().tolist() for shard in shards]
        self.lengths: list[int] = [lengths[number][i] for number, i in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, i = self._places[index]
        shard = self._shards[number]
        begin, end = shard["offsets"][i : i + 2].tolist()
        tokens, supervised = shard["tokens"][begin:end].long(), shard["supervised"][begin:end].clone()
        return Document(tokens, supervised, bool(shard["cut"][i]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.folder, self.manifest)  # another process maps the same files anew

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raises ValueError where the tokens are those of another tokenizer; None, of a target without one, passes."""
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.tokenizer:
            raise UsageError(
                f"{self.folder} was made with the tokenizer {self.tokenizer} and the target's is "
                f"{tokenizer_fingerprint(tokenizer)}; make the data anew with this target."
            )


def read_data(folder: str | Path, unfinished: bool = False) -> TokenData:
    """Open a data folder. Documents are read from disk when they are asked for.

    Args:
        unfinished: Take data that are still being made as well: the documents of the shards that there are now, which
            stay as they are when others come.

    Raises:
        ValueError: The folder is absent, unfinished or broken, or holds no supervised token.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    if manifest is None:
        raise UsageError(f"{folder / MANIFEST} does not exist; give a folder made by `blockdraft data`.")
    if not manifest["finished"] and not unfinished:
        raise UsageError(f"{folder} is unfinished; run the `blockdraft data` command that began it again.")
    if not manifest["finished"] and not manifest["counts"].get("supervised"):
        raise UsageError(
            f"{folder} is unfinished and holds nothing to learn from yet; wait until `blockdraft data` has written the "
            f"first documents, about {SHARD_SECONDS:.0f} s after it has begun to make some."
        )
    if not manifest["counts"]["supervised"]:
        raise UsageError(f"{folder} holds no supervised token, so there is nothing to learn; make it from other rows.")
    return _open(folder, manifest)


def _open(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """The documents that a manifest names."""
    shards = read_shards(folder)
    if not manifest["finished"]:  # others may have come since
        shards = {name: shard for name, shard in shards.items() if name in manifest["shards"]}
    found = _rows_of(shards)
    if found != manifest["shards"]:
        raise UsageError(f"{folder} holds the shards {found} and should hold {manifest['shards']}; copy it again.")
    return TokenData(folder, manifest, list(shards.values()))


def read_state(folder: Path, manifest: dict[str, Any]) -> TokenData:
    """Open a folder as it was when its manifest was this one, although it may have grown since. Raises ValueError where
    shards of then are gone."""
    return _open(folder, {**manifest, "finished": False})


def grown_since(data: TokenData, fingerprint: str) -> tuple[int, int] | None:
    """How many documents and tokens have come since the data had this fingerprint, finished or not; None if they never
    had it. They hold what they held then, but what was read unfinished may have others in between."""
    states = _states(data.manifest)
    then = next((state for state in states if state["fingerprint"] == fingerprint), None)
    if then is None:
        return None
    return states[-1]["documents"] - then["documents"], states[-1]["tokens"] - then["tokens"]


def _states(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What a folder has held one after the other, the present last."""
    states: list[dict[str, Any]] = list(manifest.get("states") or [])
    if manifest.get("fingerprint") and (not states or states[-1]["fingerprint"] != manifest["fingerprint"]):
        counts = {name: manifest["counts"][name] for name in ("documents", "tokens")}
        states.append({"fingerprint": manifest["fingerprint"], **counts})
    return states


def _rows_of(shards: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    return {name: len(shard["rows"]) for name, shard in shards.items()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary: what each token id stands for."""
    return fingerprint(sorted(tokenizer.get_vocab().items()))


def read_shards(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Map the finished shards of a folder, by name. Raises ValueError for a broken one."""
    shards = {}
    for path in sorted(folder.glob("tokens-*.safetensors")):
        try:
            shard = load_file(path)
            whole = int(shard["offsets"][-1]) == len(shard["tokens"]) == len(shard["supervised"])
            if not whole or len(shard["offsets"]) != len(shard["rows"]) + 1:
                raise UsageError("its tensors do not fit together")
        except (OSError, SafetensorError, LookupError, ValueError) as error:
            raise UsageError(f"{path} is broken ({error}); delete it, and make the data again.") from error
        shards[path.name] = shard
    return shards


class DataWriter:
    """Makes a data folder, or goes on with an unfinished one, or adds to a finished one.

    Args:
        folder: Made if need be.
        identity: What the data are made with, `tokenizer` among it. A folder of the same identity is gone on with.

    Attributes:
        done: Source rows that need no work any more.
        supervised: Supervised tokens added in this run.

    Raises:
        ValueError: The folder holds data of another identity, or other files.
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
            row for shard in self._shards.values() for row in shard["rows"].tolist() + shard["left_out"][:, 0].tolist()
        }
        self.supervised = 0
        self._clear()

    def begin(self, **facts: Any) -> None:
        """Mark the folder as unfinished, and note facts in its manifest."""
        make_folder(self.folder)
        self._record(self._chained(), finished=False, **facts)

    def add(self, row: int, documents: Sequence[Document], reason: str | None = None) -> None:
        """Take a source row's documents, or the reason, one of `REASONS`, for which it has none."""
        assert (reason is None) == bool(documents)
        if reason is not None:
            self._left_out.append((row, REASONS.index(reason)))
        for document in documents:
            self._documents.append((row, document))
            self._held += len(document.tokens)
            self.supervised += int(document.supervised.sum())
        self.done.add(row)
        if self._held >= SHARD_TOKENS or time.monotonic() - self._since > SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added as a shard, and record it."""
        if self._write_shard():
            self._record(self._chained(), finished=False)

    def _write_shard(self) -> bool:
        some = bool(self._documents or self._left_out)
        if some:
            rows, documents = [row for row, _ in self._documents], [document for _, document in self._documents]
            nothing = torch.zeros(0, dtype=torch.int32)
            shard = {
                "tokens": torch.cat([nothing, *(document.tokens.int() for document in documents)]),
                "supervised": torch.cat([nothing.bool(), *(document.supervised for document in documents)]),
                "offsets": torch.tensor([0, *(len(document.tokens) for document in documents)]).cumsum(0),
                "rows": torch.tensor(rows, dtype=torch.int64),
                "cut": torch.tensor([document.cut for document in documents], dtype=torch.bool),
                "left_out": torch.tensor(self._left_out, dtype=torch.int64).reshape(-1, 2),
            }
            path = self.folder / f"tokens-{self._next:05}.safetensors"
            write_file(path, save(shard))
            self._shards[path.name] = load_file(path)  # mapped, so that memory does not fill
            self._next += 1
        self._clear()
        return some

    def finish(self) -> dict[str, Any]:
        """Count, and mark the folder as finished; returns its manifest.

        Raises:
            ValueError: There is no supervised token in it.
        """
        self._write_shard()
        counts = self._counts()
        if not counts["supervised"]:
            raise UsageError(
                f"None of the {counts['rows']} rows has a token to learn from (left out: {counts['left_out']}); "
                f"check the rows and the chat template, then delete {self.folder}."
            )
        assert self.manifest is not None
        digest = hashlib.sha256(self._identity["tokenizer"].encode())
        for document in TokenData(self.folder, self.manifest, list(self._shards.values())):
            digest.update(len(document.tokens).to_bytes(8, "little"))
            digest.update(document.tokens.int().numpy().tobytes() + document.supervised.numpy().tobytes())
        return self._record(digest.hexdigest()[:16], finished=True)

    def _counts(self) -> dict[str, Any]:
        shards = list(self._shards.values())
        reasons = Counter(int(i) for shard in shards for i in shard["left_out"][:, 1])
        return {
            "rows": len(self.done),
            "documents": sum(len(shard["rows"]) for shard in shards),
            "tokens": sum(len(shard["tokens"]) for shard in shards),
            "supervised": sum(int(shard["supervised"].sum()) for shard in shards),
            "cut": sum(int(shard["cut"].sum()) for shard in shards),
            "left_out": {REASONS[i]: count for i, count in sorted(reasons.items())},
        }

    def _chained(self) -> str | None:
        """The fingerprint of an unfinished state: of the state before it and the shards that are new since, as reading
        all of them each time would take too long."""
        known = self.manifest or {}
        found: str | None = known.get("fingerprint")
        for name, shard in self._shards.items():
            if name not in known.get("shards", {}):
                digest = hashlib.sha256((found or self._identity["tokenizer"]).encode())
                for part in ("tokens", "supervised", "offsets"):
                    digest.update(shard[part].numpy().tobytes())
                found = digest.hexdigest()[:16]
        return found

    def _clear(self) -> None:
        self._documents: list[tuple[int, Document]] = []
        self._left_out: list[tuple[int, int]] = []
        self._held, self._since = 0, time.monotonic()

    def _record(self, fingerprint: str | None, finished: bool, **facts: Any) -> dict[str, Any]:
        """Write the manifest of the present state; returns it."""
        known = self.manifest or {}
        state = {"finished": finished, "fingerprint": fingerprint, "counts": self._counts()}
        self.manifest = {"format": FORMAT} | self._identity | known | facts | state | {"shards": _rows_of(self._shards)}
        self.manifest["states"] = _states({**self.manifest, "states": _states(known)})
        write_file(self.folder / MANIFEST, (json.dumps(self.manifest, indent=2) + "\n").encode())
        return self.manifest
