"""Processes that are measured; they answer JSON lines (protocol: benchmarks/peers/README.md)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

T, W = TypeVar("T"), TypeVar("W")
Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all

REASON_LENGTH = 300  # characters of a failure that are shown


class PeerError(Exception):
    """A system is missing or has failed; the message says why."""


def peak_bytes(process: int) -> int:
    """Return the peak memory of a process with its mapped files, or 0 if the system does not report it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(found["VmHWM"].split()[0]) if "VmHWM" in found else 0


def last_words(log: Path, status: int | None) -> str:
    """Return how a process ended: its status and the last line of its log."""
    told = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"it ended with {status}: {told[-1] if told else 'no message'}"[:REASON_LENGTH]


class PeerProcess:
    """A process that has loaded its models; a context manager ends it.

    Args:
        command: The adapter.
        settings: Its last argument, as JSON.
        threads: OMP_NUM_THREADS; None leaves the variable as it is.
        log: File for its standard error.
        patience: Most seconds for loading, and for each answer.
        environment: Further variables.

    Attributes:
        about: Versions and settings that it reports.
        answers: Names of the requests that it answers.
        start_seconds: From starting it until it was ready.

    Raises:
        PeerError: It cannot be started, says that it is missing, or ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        threads: int | None,
        log: Path,
        patience: float,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._log, self._patience = log, patience
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment or {})
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        began = time.monotonic()
        try:
            with log.open("w") as errors:
                self.process = subprocess.Popen(
                    [*command, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=variables,
                    cwd=cwd,
                    start_new_session=True,  # the benchmark handles interrupts
                )
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started ({error.strerror})") from error
        try:
            first = self._read()
            if "ready" not in first:
                raise PeerError(first.get("missing") or f"it began with {first}")
        except BaseException:
            self.close()
            raise
        self.about: dict[str, str] = first["ready"]
        self.answers: list[str] = first.get("answers", [])
        self.start_seconds = time.monotonic() - began

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask a request. Raises PeerError if the process fails, ends or exceeds its patience."""
        assert self.process.stdin is not None
        with suppress(OSError):  # if it has ended, reading tells why
            self.process.stdin.write(json.dumps({name: request}) + "\n")
            self.process.stdin.flush()
        return self._read()

    def peak_bytes(self) -> int:
        return peak_bytes(self.process.pid)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = Timer(self._patience, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()
            in_time = late.is_alive()
        finally:
            late.cancel()  # also when interrupted, since the process would wait for it
        if not line and not in_time:
            raise PeerError(f"no answer within {self._patience:g} s")
        if not line:
            raise PeerError(last_words(self._log, self.process.wait()))
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerError(f"it printed {line.strip()[:REASON_LENGTH]!r} in the place of an answer") from error
        if "error" in answer:
            raise PeerError(answer["error"][:REASON_LENGTH])
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):  # unwritten input
                stream.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Processes(ExitStack):
    """Processes by key, started when first needed. One that fails is left out from then on.

    Args:
        start: Starts the process of a key.

    Attributes:
        running: Processes that were started.
        missing: Why others cannot be had, by key.
    """

    def __init__(self, start: Callable[[Any], PeerProcess]) -> None:
        super().__init__()
        self._start = start
        self.running: dict[Any, PeerProcess] = {}
        self.missing: dict[Any, str] = {}

    def started(self, key: Any) -> PeerProcess | None:
        """Return the process of a key, or None if it is missing."""
        if key not in self.running and key not in self.missing:
            try:
                self.running[key] = self.enter_context(self._start(key))
            except PeerError as error:
                self.missing[key] = str(error)
        return None if key in self.missing else self.running[key]

    def ask(self, key: Any, name: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask a process. Returns None if it is missing or fails."""
        if (process := self.started(key)) is None:
            return None
        try:
            return process.ask(name, request)
        except PeerError as error:
            self.missing[key] = f"failed: {error}"
            return None

    def decode(
        self,
        steps: Sequence[tuple[int, T, W]],
        request: Callable[[T, W], Mapping[str, Any]],
        keep: Callable[[int, T, W, dict[str, Any]], None],
        progress: Progress,
        key: Callable[[W], Any] = lambda way: way,
    ) -> None:
        """Do the steps of `interleaving.interleaved`. Each method first warms up on the first of its tasks.

        Args:
            request: Request for a task that is done in a way.
            keep: Takes repeat, task, way and answer of each step.
            key: Key of the process that decodes in a way.
        """
        first = {way: task for _, task, way in reversed(steps)}
        for i, (way, task) in enumerate(first.items()):
            progress("warming up", i, len(first))
            self.ask(key(way), "decode", request(task, way))
        for done, (repeat, task, way) in enumerate(steps, 1):
            answer = self.ask(key(way), "decode", request(task, way))
            if answer is not None:
                keep(repeat, task, way, answer)
            progress("answers", done, len(steps))
