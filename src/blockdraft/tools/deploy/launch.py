"""`blockdraft launch`: starts other engines with a pair."""

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
from blockdraft.tools.inspect import checked_pair

HOST = "127.0.0.1"
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TENSORRT_LLM}
# Options that turn metrics on.
METRICS: dict[str, list[str]] = {"vllm": [], "sglang": ["--enable-metrics"], "trtllm": []}
# Options that turn prefix caching off, so that every prompt is computed.
NO_PREFIXES = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"], "trtllm": []}
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}}  # the same in the file of TensorRT-LLM
POLL_SECONDS, GRACE_SECONDS = 0.2, 60.0
STDERR = 2


@dataclass(frozen=True)
class Command:
    """The command that starts an engine.

    Attributes:
        line: Program and arguments.
        files: Contents of the files that the arguments name, by name.
    """

    line: list[str]
    files: dict[str, str]

    def shell(self) -> str:
        """The command as typed into a shell."""
        return as_typed(shlex.join(self.line), self.files)

    def placed(self, folder: Path) -> list[str]:
        """The line, with its files written into this folder."""
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
    """The command that starts an engine with a pair. It checks first that the drafter fits the target.

    Args:
        engine: Key of `ENGINES`.
        target: Folder or hub name.
        drafter: Folder.
        port: Port of this machine at which the engine will listen.
        prefix_caching: Whether the engine may cache prefixes, as it does by default.
        more: Further options for the engine, appended to the line.
        note: Called with each warning; see `checked_pair`.

    Raises:
        UsageError: The drafter cannot be read, does not fit the target, or the engine cannot use it.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    report = checked_pair(drafter, target, note)
    start = report.starts[ENGINES[engine]]
    if start.line is None:
        remedy = "" if start.remedy is None else f" Export it first: {start.remedy}"
        raise UsageError(f"{ENGINES[engine]} cannot be started with {drafter}: {start.reason}.{remedy}")
    found = [*shlex.split(start.line), "--host", HOST, "--port", str(port), *METRICS[engine]]
    return Command(
        line=[*found, *([] if prefix_caching else NO_PREFIXES[engine]), *more], files=_files(start, prefix_caching)
    )


def _files(start: Start, prefix_caching: bool) -> dict[str, str]:
    files = dict(start.files)
    if TENSORRT_LLM_FILE in files and not prefix_caching:
        files[TENSORRT_LLM_FILE] = json.dumps(json.loads(files[TENSORRT_LLM_FILE]) | NO_REUSE)
    return files


class Running:
    """A running engine. As a context manager, it ends the engine.

    The engine prints to standard error. SIGTERM raises KeyboardInterrupt in the meantime, so that ending this process
    ends the engine too. Python handles signals in the main thread only, so this holds for engines started there.

    Args:
        line: Program and arguments.
        port: Port at which the engine will listen.
        patience: Seconds until the engine must answer.

    Raises:
        UsageError: The port is in use, the program does not exist, or the engine ends or does not answer in time.
    """

    def __init__(self, line: Sequence[str], port: int, patience: float) -> None:
        self.url = f"http://{HOST}:{port}"
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                raise UsageError(f"port is {port}, which is in use; give another --port.")
        try:
            self.process = psutil.Popen(line, stdin=subprocess.DEVNULL, stdout=STDERR)
        except OSError as error:
            raise UsageError(
                f"{line[0]} cannot be started ({error.strerror}); install the engine, or print the command with "
                "--dry-run and run it on a machine that has the engine."
            ) from error
        self._workers = set[psutil.Process]()
        self._handles_signals = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGTERM, _interrupt) if self._handles_signals else None
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
                raise UsageError(f"{name} ended with status {status} before it answered; its output above says why.")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_SECONDS)
        raise UsageError(f"The engine did not answer at {self.url}/health in {patience:g} s; raise --patience.")

    def _note_workers(self) -> None:
        """Remember the engine's child processes. Once the engine has died, they can no longer be found."""
        with suppress(psutil.NoSuchProcess):
            self._workers.update(self.process.children(recursive=True))

    def wait(self) -> int:
        """Wait until the engine ends by itself. Returns its exit status."""
        return int(self.process.wait())

    def close(self) -> None:
        """Terminate the engine and its workers, and kill those that have not ended after `GRACE_SECONDS`."""
        if self._handles_signals:
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
