"""Other engines, started with a pair."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from blockdraft.errors import UsageError
from blockdraft.formats.starting import SGLANG, TENSORRT_LLM, TENSORRT_LLM_FILE, VLLM, Start, as_typed
from blockdraft.tools.deploy.pair import checked_pair

HOST = "127.0.0.1"
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TENSORRT_LLM}
# Options for figures, and for prompts that are read each time.
METRICS: dict[str, list[str]] = {"vllm": [], "sglang": ["--enable-metrics"], "trtllm": []}
NO_PREFIXES = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"], "trtllm": []}
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}}  # the same in TensorRT-LLM's file
POLL_SECONDS, GRACE_SECONDS = 0.2, 60.0
STDERR = 2


@dataclass(frozen=True)
class Command:
    """What starts an engine.

    Attributes:
        files: Names and contents of files that the line names.
    """

    line: list[str]
    files: dict[str, str]

    def shell(self) -> str:
        """As one types it."""
        return as_typed(shlex.join(self.line), self.files)

    def placed(self, folder: Path) -> list[str]:
        """The line with its files in this folder, into which they are written."""
        for name, content in self.files.items():
            (folder / name).write_text(content + "\n", encoding="utf-8")
        return [str(folder / word) if word in self.files else word for word in self.line]


def command(
    engine: str,
    target: str,
    drafter: str,
    port: int,
    prefix_caching: bool = False,
    more: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
) -> Command:
    """What starts an engine with a pair, after a check that the two go together.

    Args:
        engine: Of `ENGINES`.
        target: Folder or hub name.
        drafter: Folder.
        prefix_caching: Whether the engine caches prefixes as it usually does.
        more: Further options of the engine, which come last.
        note: As in `checked_pair`.

    Raises:
        ValueError: The drafter cannot be read, does not fit the target, or the engine does not read it.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    report = checked_pair(drafter, target, note)
    start = report.starts[ENGINES[engine]]
    if start.line is None:
        remedy = "" if start.remedy is None else f" Write it anew: {start.remedy}"
        raise UsageError(f"{ENGINES[engine]} cannot be started with {drafter}: {start.reason}.{remedy}")
    found = [*shlex.split(start.line), "--host", HOST, "--port", str(port), *METRICS[engine]]
    return Command([*found, *([] if prefix_caching else NO_PREFIXES[engine]), *more], _files(start, prefix_caching))


def _files(start: Start, prefix_caching: bool) -> dict[str, str]:
    files = dict(start.files)
    if TENSORRT_LLM_FILE in files and not prefix_caching:
        files[TENSORRT_LLM_FILE] = json.dumps(json.loads(files[TENSORRT_LLM_FILE]) | NO_REUSE)
    return files


class Running:
    """An engine that was started, for `with`, which ends it. What it prints goes to standard error. Meanwhile SIGTERM,
    with which others end this process, is a KeyboardInterrupt, so that the engine ends too, if it is started in
    the main thread, which alone hears signals.

    Args:
        line: Its command.
        port: That it will listen at.
        patience: Seconds that it may take until it answers.

    Raises:
        ValueError: The port is taken, there is no such program, or it ends or is silent too long.
    """

    def __init__(self, line: Sequence[str], port: int, patience: float) -> None:
        self.url = f"http://{HOST}:{port}"
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                raise UsageError(f"port is {port}, where something listens already; give another --port.")
        try:
            self.process = psutil.Popen(line, stdin=subprocess.DEVNULL, stdout=STDERR)
        except OSError as error:
            raise UsageError(
                f"{line[0]} cannot be started ({error.strerror}); install the engine, or print the command with "
                "--dry-run and start it where it is."
            ) from error
        self._workers = set[psutil.Process]()
        self._hears = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGTERM, _interrupt) if self._hears else None
        try:
            self._wait(patience)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience: float) -> None:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            self._note_workers()
            status = self.process.poll()
            if status is not None:
                name = Path(self.process.args[0]).name
                raise UsageError(f"{name} ended with status {status} before it answered; above is what it said.")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_SECONDS)
        raise UsageError(f"The engine did not answer at {self.url}/health in {patience:g} s; give it more --patience.")

    def _note_workers(self) -> None:
        """While the engine lives: whose children they were cannot be seen any more when it has died."""
        with suppress(psutil.NoSuchProcess):
            self._workers.update(self.process.children(recursive=True))

    def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        return int(self.process.wait())

    def close(self) -> None:
        """Tell it and its workers to end, and make those end that do not."""
        if self._hears:
            signal.signal(signal.SIGTERM, self._before)
        self._note_workers()
        family = [self.process, *self._workers]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        _, alive = psutil.wait_procs(family, GRACE_SECONDS)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
