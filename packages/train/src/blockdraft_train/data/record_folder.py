"""Folder of recorded conversations, which `blockdraft serve --record` writes.

The folder is a data folder as training reads it, with shards of tokens and the manifest `data.json`. With hidden states
it has a folder `hidden-states` beside the shards. A conversation is one document, however many requests it took. Until
no further turn is expected, it lies in a file of the folder `open`, which each of its requests replaces. So a process
that is killed loses at most the request that it was writing, and the next one puts what it left into shards.

A shard has two more tensors than other training data, `drafted` and `rejected`, and in its metadata the sampling
parameters of each request. See `token_data.py` for the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import fingerprint, held, write_file
from blockdraft.targets import Target, target_fingerprint
from blockdraft.types import MIN_RECORD_BYTES
from blockdraft_train.data.token_data import (
    FORMAT,
    HIDDEN_STATES_MANIFEST,
    MANIFEST,
    hidden_states_name,
    shard_name,
    token_shard,
    tokenizer_fingerprint,
)

HIDDEN_STATES = "hidden-states"  # folder of the hidden states in a record folder
OPEN = "open"  # folder of conversations that may go on
SHARDS = 8  # at least, before the oldest is deleted
SHARD_BYTES = 2**26


@dataclass
class OpenConversation:
    """A conversation that may go on.

    Attributes:
        number: Number of its file.
        tensors: `tokens`, `supervised`, `drafted` and `rejected`, each `[S]`.
        sampling: Sampling parameters of each turn.
        used: Time of its last turn, by `time.monotonic`.
    """

    number: int
    tensors: dict[str, Tensor]
    sampling: list[dict[str, Any]]
    used: float

    def is_continued_by(self, prompt: Tensor) -> bool:
        tokens = self.tensors["tokens"]
        return len(tokens) <= len(prompt) and bool((prompt[: len(tokens)] == tokens).all())


class RecordFolder:
    """The files of a record folder. One process at a time may hold it.

    Args:
        folder: The folder, which is made if it does not exist.
        target: Target whose requests are recorded.
        target_layers: Target layers whose hidden states are stored; empty for none.
        limit: Most bytes that the files may take. Beyond it, the oldest conversations are deleted.

    Raises:
        UsageError: The folder holds the conversations of another target, or with other hidden states, or other files;
            another process holds it; or it cannot be written.
    """

    def __init__(self, folder: Path, target: Target, target_layers: Sequence[int], limit: int) -> None:
        if target.tokenizer is None:
            raise UsageError("Without a tokenizer, the target's requests cannot be recorded; leave out --record.")
        if limit < MIN_RECORD_BYTES:
            raise UsageError(f"record_bytes must be at least {MIN_RECORD_BYTES}, got {limit}.")
        self.folder, self.target_layers, self._limit = folder, tuple(target_layers), limit
        self.shard_bytes = min(SHARD_BYTES, limit // SHARDS)
        self.width = len(self.target_layers) * target.hidden_size
        author = target_fingerprint(target)
        self._identity = {
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "target": author,
            "recorded_target_layers": list(self.target_layers),
        }
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            **self._identity,
            "written_by": {"writer": "target", "author": author, "mode": "served"},
            "removed": [],
            "skipped": 0,
            "states": [],
            "next_row": 0,
            "next_shard": 0,
            "moved": [],
            "shards": {},
            "documents": {},
        }
        self._resources = ExitStack()
        self._resources.enter_context(held(folder, "recording", "--record"))
        try:
            self._open()
        except OSError as error:
            self.close()
            raise UsageError(
                f"{folder} cannot be written ({error.strerror}); choose another folder for --record."
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path = self.folder / MANIFEST
        if path.exists():
            try:
                manifest = json.loads(path.read_text(encoding="utf-8"))
                names = {name: manifest[name] for name in (*self._identity, "next_row", "next_shard", "moved")}
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise UsageError(f"{path} was not recorded ({error!r}); choose another folder for --record.") from error
            if names["target"] != self._identity["target"]:
                raise UsageError(
                    f"{self.folder} holds the conversations of another target (fingerprint {names['target']}) than "
                    f"this one ({self._identity['target']}); choose another folder for --record."
                )
            if names["tokenizer"] != self._identity["tokenizer"]:
                raise UsageError(
                    f"{self.folder} was recorded with another tokenizer; choose another folder for --record."
                )
            if names["recorded_target_layers"] != self._identity["recorded_target_layers"]:
                theirs, ours = (
                    f"with hidden states of the target layers {', '.join(map(str, layers))}"
                    if layers
                    else "without hidden states"
                    for layers in (names["recorded_target_layers"], self.target_layers)
                )
                raise UsageError(
                    f"{self.folder} was recorded {theirs}, and not {ours}; choose another folder for --record, or "
                    "change --record-hidden-states or the drafter."
                )
            self._manifest = manifest
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} holds other files; choose another folder for --record.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with suppress(PermissionError):  # the folder of another owner keeps its mode
                self.folder.chmod(0o700)  # the conversations are private, also in a folder that was there
        (self.folder / OPEN).mkdir(exist_ok=True)
        for remains in self.folder.rglob(".*.tmp"):
            remains.unlink()
        for shard in self.folder.glob("tokens-*.safetensors"):
            if shard.name not in self._manifest["shards"]:  # its conversations are still in `open`
                shard.unlink()
        for number in self._manifest["moved"]:
            self.conversation(number).unlink(missing_ok=True)
        self._manifest["moved"] = []
        self._write_manifests()

    @property
    def left(self) -> list[Path]:
        """Files of conversations that are in no shard, the oldest first."""
        return sorted((self.folder / OPEN).glob("*.safetensors"))

    @property
    def next_number(self) -> int:
        """Number for a new conversation."""
        return max((int(path.stem) + 1 for path in self.left), default=0)

    def conversation(self, number: int) -> Path:
        return self.folder / OPEN / f"{number:09}.safetensors"

    def write_conversation(self, conversation: OpenConversation, hidden_states: Tensor | None) -> None:
        """Write a conversation as it is after a turn."""
        tensors = dict(conversation.tensors)
        if self.target_layers:
            assert hidden_states is not None
            tensors["hidden_states"] = hidden_states
        metadata = {"sampling": json.dumps(conversation.sampling)}
        write_file(self.conversation(conversation.number), save(tensors, metadata))
        self._make_room()

    def write_shard(self, paths: Sequence[Path]) -> None:
        """Put conversations into a shard, and delete their files."""
        paths = [path for path in paths if path.exists()]
        if not paths:
            return
        documents = [load_file(path) for path in paths]
        number, manifest = self._manifest["next_shard"], self._manifest
        rows = list(range(manifest["next_row"], manifest["next_row"] + len(paths)))
        shard = token_shard(
            [document["tokens"] for document in documents],
            [document["supervised"] for document in documents],
            rows,
            [False] * len(rows),
        )
        shard |= {name: torch.cat([document[name] for document in documents]) for name in ("drafted", "rejected")}
        content = save(shard, {"sampling": json.dumps([sampling_of(path) for path in paths])})
        if self.target_layers:
            hidden_states = torch.cat([document["hidden_states"] for document in documents])
            self._write_hidden_states(number, hidden_states)
        write_file(self.folder / shard_name(number), content)
        manifest["shards"][shard_name(number)] = len(rows)
        manifest["documents"][shard_name(number)] = {
            "lengths": [len(document["tokens"]) for document in documents],
            "supervised": int(shard["supervised"].sum()),
            "digest": hashlib.sha256(content).hexdigest()[:16],
        }
        manifest["next_shard"], manifest["next_row"] = number + 1, rows[-1] + 1
        manifest["moved"] = [int(path.stem) for path in paths]  # for a process that is killed before it deletes them
        self._write_manifests()
        for path in paths:
            path.unlink()
        self._make_room()

    def _write_hidden_states(self, number: int, hidden_states: Tensor) -> None:
        (self.folder / HIDDEN_STATES).mkdir(exist_ok=True)
        content = save({"hidden_states": hidden_states})
        write_file(self.folder / HIDDEN_STATES / hidden_states_name(number), content)

    def _write_manifests(self) -> None:
        manifest, documents = self._manifest, self._manifest["documents"]
        lengths = [part["lengths"] for part in documents.values()]
        manifest["counts"] = {
            "rows": sum(map(len, lengths)),
            "documents": sum(map(len, lengths)),
            "tokens": sum(map(sum, lengths)),
            "supervised": sum(part["supervised"] for part in documents.values()),
            "cut": 0,
            "left_out": {},
        }
        digests = [part["digest"] for part in documents.values()]
        manifest |= {"finished": True, "fingerprint": fingerprint([manifest["tokenizer"], *digests])}
        if self.target_layers and manifest["next_shard"]:
            numbers = [documents.get(shard_name(i), {"lengths": []})["lengths"] for i in range(manifest["next_shard"])]
            first = [sum(map(len, numbers[:i])) for i in range(len(numbers))]
            states = {
                "format": FORMAT,
                "target": manifest["target"],
                "data": manifest["fingerprint"],
                "target_layers": list(self.target_layers),
                "dtype": "bfloat16",
                "first": first,
                "lengths": numbers,
            }
            write_file(self.folder / HIDDEN_STATES / HIDDEN_STATES_MANIFEST, json.dumps(states).encode() + b"\n")
        write_file(self.folder / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def _make_room(self) -> None:
        """Delete the oldest conversations until the files take no more than the limit."""
        while self.bytes > self._limit:
            if self._manifest["shards"]:
                oldest = next(iter(self._manifest["shards"]))
                del self._manifest["shards"][oldest], self._manifest["documents"][oldest]
                self._write_manifests()
                (self.folder / oldest).unlink()
                if self.target_layers:  # the place of a shard in the list is its number
                    number = int(oldest.removesuffix(".safetensors").rpartition("-")[2])
                    self._write_hidden_states(number, torch.empty(0, self.width, dtype=torch.bfloat16))
            elif self.left:
                self.left[0].unlink()
            else:
                return

    def close(self) -> None:
        """Let other processes hold the folder."""
        self._resources.close()


def sampling_of(path: Path) -> Any:
    """Return the sampling parameters in a file of a conversation or a shard."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["sampling"])
