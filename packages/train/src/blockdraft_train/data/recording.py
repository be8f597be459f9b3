"""Records finished requests as training data: what `blockdraft serve --record` writes.

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
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from blockdraft.engine import Recorder, Request
from blockdraft.errors import UsageError, describe
from blockdraft.folders import fingerprint, held, write_file
from blockdraft.targets import Target, target_fingerprint
from blockdraft.types import RECORD_BYTES
from blockdraft_train.data.token_data import (
    FORMAT,
    HIDDEN_STATES_MANIFEST,
    MANIFEST,
    hidden_states_name,
    shard_name,
    token_shard,
    tokenizer_fingerprint,
)

log = logging.getLogger(__name__)

HIDDEN_STATES = "hidden-states"  # folder of the hidden states in a record folder
OPEN = "open"  # folder of conversations that may go on
MIN_BYTES = 2**20
SHARDS = 8  # at least, before the oldest is deleted
SHARD_BYTES = 2**26
TURN_SECONDS = 600.0  # after which no further turn of a conversation is expected
MAX_OPEN = 64  # conversations that are expected to go on
SHARD_SECONDS = 120.0  # between the end of a conversation and its shard
TICK_SECONDS = 5.0
MAX_QUEUED = 64  # requests that wait to be written
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", *PENALTIES)


class Turn(NamedTuple):
    """A finished request.

    Attributes:
        prompt, tokens: Token ids `[P]` and `[S]` int32 of the prompt and of the answer.
        drafted: `[S]` bool; which tokens of the answer were draft tokens.
        rejected: `[S]` uint8; the draft tokens that were rejected in the step that ended with this token.
        sampling: Sampling parameters by name.
        hidden_states: As in `Recorder.record`.
    """

    prompt: Tensor
    tokens: Tensor
    drafted: Tensor
    rejected: Tensor
    sampling: dict[str, Any]
    hidden_states: Tensor | None


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
        if limit < MIN_BYTES:
            raise UsageError(f"record_bytes must be at least {MIN_BYTES}, got {limit}.")
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


class ConversationRecorder(Recorder):
    """Writes finished requests to a folder, in a thread of its own.

    A request whose prompt begins with an earlier conversation, the answer included, is a further turn of it.

    If a file cannot be written, for instance because the disk is full, recording ends with a warning.

    Args:
        folder, target, target_layers, limit: See `RecordFolder`.

    Attributes:
        failure: Why recording ended; None while it goes on.
    """

    def __init__(
        self, folder: Path, target: Target, target_layers: Sequence[int] = (), limit: int = RECORD_BYTES
    ) -> None:
        self.folder = RecordFolder(folder, target, target_layers, limit)
        self.target_layers = self.folder.target_layers
        self.failure: str | None = None
        self._open: dict[int, OpenConversation] = {}  # by number, the one with the oldest turn first
        self._ended: list[Path] = self.folder.left  # of an earlier process
        self._ended_at = time.monotonic()
        self._next_number = self.folder.next_number
        self._full = False
        self._queue: Queue[Turn | None] = Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="blockdraft-record", daemon=True)
        self._thread.start()

    def record(self, request: Request, hidden_states: Tensor | None) -> None:
        turn = None if self.failure is not None else self.turn(request, hidden_states)
        if turn is None:
            return
        try:
            self._queue.put_nowait(turn)
        except Full:
            if not self._full:
                log.warning("The disk is slower than the answers, so some conversations are not recorded.")
            self._full = True

    def turn(self, request: Request, hidden_states: Tensor | None) -> Turn | None:
        """Return what is written of a request, or None without an answer or its hidden states."""
        if not request.token_ids:
            return None
        length = len(request.prompt) + len(request.token_ids)
        if self.target_layers:
            if hidden_states is None or len(hidden_states) < length - 1:
                log.warning("A request is not recorded, since hidden states of its tokens are missing.")
                return None
            # Nothing was decoded behind the last token. No training pass reads its hidden states.
            last = hidden_states.new_zeros(1, hidden_states.size(1))
            hidden_states = torch.cat([hidden_states[: length - 1], last])
        return Turn(
            torch.tensor(request.prompt, dtype=torch.int32),
            torch.tensor(request.token_ids, dtype=torch.int32),
            torch.tensor(request.drafted, dtype=torch.bool),
            torch.tensor(rejected_counts(request), dtype=torch.uint8),
            {name: getattr(request.params, name) for name in SAMPLING},
            hidden_states,
        )

    def close(self) -> None:
        """Put all conversations into shards, and release the folder."""
        while self._thread.is_alive():
            with suppress(Full):  # until the thread takes a turn, or ends because it cannot write
                self._queue.put(None, timeout=TICK_SECONDS)
                self._thread.join()

    def _run(self) -> None:
        try:
            for turn in self._turns():
                try:
                    self.write(turn)
                except Exception as error:  # such as a full disk
                    self.failure = describe(error)
                    log.warning("Nothing is recorded any more: %s Answers go on.", self.failure)
                    return
        finally:
            self.folder.close()

    def _turns(self) -> Iterator[Turn | None]:
        """Yield finished requests, and None every few seconds and at the end."""
        while True:
            try:
                turn = self._queue.get(timeout=TICK_SECONDS)
            except Empty:
                yield None
                continue
            if turn is None:
                self._ended += [self.folder.conversation(number) for number in self._open]
                self._open.clear()
                self._ended_at = -SHARD_SECONDS
                yield None
                return
            yield turn

    def write(self, turn: Turn | None) -> None:
        """Write a turn, and what is due: conversations that have ended, and shards."""
        now = time.monotonic()
        if turn is not None:
            self._add(turn, now)
        for number, conversation in list(self._open.items()):
            if now - conversation.used > TURN_SECONDS or len(self._open) > MAX_OPEN:
                del self._open[number]
                if not self._ended:
                    self._ended_at = now
                self._ended.append(self.folder.conversation(number))
        self._ended = [path for path in self._ended if path.exists()]  # the limit may have deleted some
        size = sum(path.stat().st_size for path in self._ended)
        if self._ended and (size >= self.folder.shard_bytes or now - self._ended_at > SHARD_SECONDS):
            self._write_shards()

    def _write_shards(self) -> None:
        """Put ended conversations into shards."""
        while self._ended:
            part, size = list[Path](), 0
            while self._ended and (not part or size < self.folder.shard_bytes):
                part.append(self._ended.pop(0))
                size += part[-1].stat().st_size
            self.folder.write_shard(part)

    def _add(self, turn: Turn, now: float) -> None:
        """Add a finished request to its conversation, or begin a new one."""
        begun = [c for c in self._open.values() if c.is_continued_by(turn.prompt)]
        conversation = max(begun, key=lambda c: len(c.tensors["tokens"]), default=None)
        if conversation is None:
            nothing = torch.empty(0, dtype=torch.int32)
            tensors = {"tokens": nothing, "supervised": nothing.bool(), "drafted": nothing.bool()}
            tensors["rejected"] = nothing.to(torch.uint8)
            conversation = OpenConversation(self._next_number, tensors, [], now)
            self._next_number += 1
        before = conversation.tensors
        given = len(turn.prompt) - len(before["tokens"])  # tokens that nobody generated here
        between, answer = torch.zeros(given, dtype=torch.uint8), torch.ones(len(turn.tokens), dtype=torch.bool)
        conversation.tensors = {
            "tokens": torch.cat([turn.prompt, turn.tokens]),
            "supervised": torch.cat([before["supervised"], between.bool(), answer]),
            "drafted": torch.cat([before["drafted"], between.bool(), turn.drafted]),
            "rejected": torch.cat([before["rejected"], between, turn.rejected]),
        }
        conversation.sampling.append(turn.sampling)
        conversation.used = now
        self._open.pop(conversation.number, None)
        self._open[conversation.number] = conversation
        self.folder.write_conversation(conversation, turn.hidden_states)


def rejected_counts(request: Request) -> list[int]:
    """Return for each token of the answer how many draft tokens its step rejected, if the token ended a step."""
    counts, end = [0] * len(request.token_ids), len(request.token_ids) - sum(request.stats.committed)
    for committed, drafted in zip(request.stats.committed, request.stats.drafted, strict=True):
        end += committed
        accepted = sum(request.drafted[end - committed : end])
        counts[end - 1] = min(max(drafted - accepted, 0), 255)
    return counts
