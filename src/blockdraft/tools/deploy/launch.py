"""`blockdraft launch`: starts other engines with a pair."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from types import TracebackType

import httpx
import psutil

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.starting import SGLANG, TENSORRT_LLM, TENSORRT_LLM_FILE, VLLM, Start, as_typed
from blockdraft.models import located
from blockdraft.models.places import folder_place, model_of
from blockdraft.tools.deploy.installed import remedy
from blockdraft.tools.inspect import checked_pair

HOST = "127.0.0.1"
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TENSORRT_LLM}
# Options that turn metrics on.
METRICS: dict[str, list[str]] = {"vllm": [], "sglang": ["--enable-metrics"], "trtllm": []}
# Options that turn prefix caching off, so that every prompt is computed.
NO_PREFIXES = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"], "trtllm": []}
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}}  # the same in the file of TensorRT-LLM
POLL_SECONDS, GRACE_SECONDS = 0.2, 60.0
ENDING = (signal.SIGTERM, signal.SIGHUP)  # signals that end the engine with this process
LAST_LINES = 15  # of the log of an engine that did not come up


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
        drafter: Folder, or "bundled".
        port: Port of this machine at which the engine will listen.
        prefix_caching: Whether the engine may cache prefixes, as it does by default.
        more: Further options for the engine, appended to the line.
        note: Called with each warning; see `checked_pair`.

    Raises:
        UsageError: The drafter cannot be read, does not fit the target, or the engine cannot use it.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    folder = _folder(target, ENGINES[engine])
    report = checked_pair(drafter, folder, note)
    start = report.starts[ENGINES[engine]]
    if start.line is None:
        remedy = "" if start.remedy is None else f" Export it first: {start.remedy}"
        raise UsageError(f"{ENGINES[engine]} cannot be started with {report.path}: {start.reason}.{remedy}")
    words, named = shlex.split(start.line), report.wants["name"]
    if folder not in words and Path(str(named)).resolve() != Path(folder).resolve():
        note(f"{report.path} names {named} as its target, which {ENGINES[engine]} serves in place of {folder}.")
    found = [*words, "--host", HOST, "--port", str(port), *METRICS[engine]]
    return Command(
        line=[*found, *([] if prefix_caching else NO_PREFIXES[engine]), *more], files=_files(start, prefix_caching)
    )


def _folder(target: str, engine: str) -> str:
    """The target as engines read it: a folder or hub name. A model of the catalogue may be here as a file besides."""
    place = Path(located(target))
    if not is_gguf(place):
        return str(place)
    model = model_of(place)
    if model is not None and folder_place(model).is_dir():
        return str(folder_place(model))
    get = "" if model is None else f"get it by `blockdraft pull {model.id} --from hub`, or "
    raise UsageError(
        f"target is {place}, a GGUF file, and {engine} is started with a model's folder; {get}let transformers write "
        "one from the file, as docs/engines.md shows."
    )


def _files(start: Start, prefix_caching: bool) -> dict[str, str]:
    files = dict(start.files)
    if TENSORRT_LLM_FILE in files and not prefix_caching:
        files[TENSORRT_LLM_FILE] = json.dumps(json.loads(files[TENSORRT_LLM_FILE]) | NO_REUSE)
    return files


class Running:
    """A running engine. As a context manager, it ends the engine.

    SIGTERM and SIGHUP raise KeyboardInterrupt in the meantime, so that ending this process ends the engine too. Python
    handles signals in the main thread only, so this holds for engines started there.

    Args:
        line: Program and arguments.
        port: Port at which the engine will listen.
        patience: Seconds until the engine must answer.
        log: File for what the engine prints; by default a new one among the temporary files.
        variables: Environment variables beside those of this process.

    Attributes:
        url: Address of the engine.
        log: The file for what it prints, which stays.

    Raises:
        UsageError: The port is in use, the program or the log's folder does not exist, or the engine ends or does not
            answer in time.
    """

    def __init__(
        self,
        line: Sequence[str],
        port: int,
        patience: float,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                raise UsageError(f"port is {port}, which is in use; give another --port.")
        self.log = new_log(line[0]) if log is None else log
        try:
            printed = self.log.open("wb")
        except OSError as error:
            raise UsageError(f"log is {self.log}, which cannot be written ({error.strerror}).") from error
        try:
            # In a session of its own, so that Ctrl-C reaches it through `close` alone, and its workers can be found.
            self.process = psutil.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"{line[0]} cannot be started ({error.strerror}); install the engine, or print the command with "
                "--dry-run and run it on a machine that has the engine."
            ) from error
        finally:
            printed.close()
        handles_signals = threading.current_thread() is threading.main_thread()
        self._before = {each: signal.signal(each, _interrupt) for each in ENDING} if handles_signals else {}
        try:
            self._wait(patience)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience: float) -> None:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            status = self.process.poll()
            if status is not None:
                raise UsageError(f"The engine ended with status {status} before it answered. {self.last_words()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_SECONDS)
        raise UsageError(
            f"The engine did not answer at {self.url}/health in {patience:g} s; raise --patience. {self.last_words()}"
        )

    def last_words(self) -> str:
        """The end of the log, in words, and what helps where that is known."""
        printed = self.log.read_text(encoding="utf-8", errors="replace")
        lines = "\n".join(f"  {line}" for line in printed.rstrip().splitlines()[-LAST_LINES:])
        help = remedy(printed)
        return (
            f"The engine's log is {self.log}"
            + (f"; what helps: {help}." if help else ".")
            + (f" It ends with\n{lines}" if lines else " It printed nothing.")
        )

    def _family(self) -> list[psutil.Process]:
        """The engine and its workers, which are in the engine's session even if it has died."""
        found: list[psutil.Process] = [self.process]
        for each in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if each.pid != self.process.pid and os.getsid(each.pid) == self.process.pid:
                    found.append(each)
        with suppress(psutil.NoSuchProcess):
            found += [each for each in self.process.children(recursive=True) if each not in found]
        return found

    def wait(self) -> int:
        """Wait until the engine ends by itself. Returns its exit status."""
        return int(self.process.wait())

    def close(self) -> None:
        """Terminate the engine and its workers, and kill those that have not ended after `GRACE_SECONDS`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        family = self._family()
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


def new_log(program: str) -> Path:
    """A new file among the temporary ones."""
    number, name = mkstemp(prefix=f"blockdraft-{Path(program).name}-", suffix=".log")
    os.close(number)
    return Path(name)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
