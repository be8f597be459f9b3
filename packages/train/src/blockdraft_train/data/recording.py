"""Recorder of finished requests as training data, which `blockdraft serve --record` uses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdraft.engine import Recorder, Request
from blockdraft.errors import describe
from blockdraft.targets import Target
from blockdraft.types import RECORD_BYTES
from blockdraft_train.data.record_folder import OpenConversation, RecordFolder

log = logging.getLogger(__name__)

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
