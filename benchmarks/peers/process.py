"""A peer at work: a process of its own that is asked by JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any

REASON_LENGTH = 300  # characters of a peer's last words that are kept


class PeerError(Exception):
    """A peer is missing or has failed; the message says why."""


def peak_bytes(process: int) -> int:
    """Most memory that a process has had, files that it reads as memory included; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(found["VmHWM"].split()[0]) if "VmHWM" in found else 0


class PeerProcess:
    """Starts a peer and waits until it has loaded its models.

    Args:
        command: The adapter.
        settings: Its first argument, as JSON; see the README.
        threads: What OpenMP gets in its environment.
        log: Where its standard error goes.
        patience: Seconds that it may take for loading, and for each answer.

    Attributes:
        about: What it tells about itself.

    Raises:
        PeerError: It cannot be started, says that it is missing, or ends.
    """

    def __init__(
        self, command: Sequence[str], settings: Mapping[str, Any], threads: int, log: Path, patience: float
    ) -> None:
        self._log, self._patience = log, patience
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        try:
            with log.open("w") as errors:
                self._process = subprocess.Popen(
                    [*command, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    start_new_session=True,  # an interrupt on the keyboard is the benchmark's business
                )
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started ({error.strerror})") from error
        try:
            first = self._read()
            if "ready" not in first:
                raise PeerError(first.get("missing") or f"it began with {first}")
        except PeerError:
            self.close()
            raise
        self.about: dict[str, str] = first["ready"]

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises PeerError where the peer fails, ends, or keeps silent for longer than the patience."""
        assert self._process.stdin is not None
        with suppress(OSError):  # where it has ended, reading tells why
            self._process.stdin.write(json.dumps({name: request}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def peak_bytes(self) -> int:
        return peak_bytes(self._process.pid)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = Timer(self._patience, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        if not line and not late.is_alive():
            raise PeerError(f"no answer within {self._patience:g} s")
        late.cancel()
        if not line:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"][:REASON_LENGTH])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        told = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"it ended with {code}: {told[-1] if told else 'no message'}"[:REASON_LENGTH]

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # about what was still to be written to it
                stream.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
