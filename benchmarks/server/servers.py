"""Servers as processes of their own: ours and llama.cpp's, always on 127.0.0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from benchmarks.harness.command import ROOT
from benchmarks.harness.process import PeerError, last_words
from benchmarks.peers import environments

HOST = "127.0.0.1"
LLAMA_SERVER = environments.folder("llama_cpp") / "build" / "bin" / "llama-server"
LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Server:
    """A healthy server at a known port.

    Args:
        command: What starts it, at a free port.
        log: File for all that it prints; an address in it tells the port.
        patience: Most seconds until it is healthy.

    Attributes:
        port: Where it listens.
        process: The running program.

    Raises:
        PeerError: It did not come up; the message says why.
    """

    def __init__(self, command: Sequence[object], log: Path, threads: int, patience: float = 300.0) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("w") as out:
            self.process = psutil.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | variables | {"PYTHONPATH": path},
                start_new_session=True,
            )
        try:
            self.port = self._wait(time.monotonic() + patience)
        except PeerError:
            self.close()
            raise

    def _wait(self, until: float) -> int:
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise PeerError(last_words(self._log, self.process.returncode))
            found = LISTENING.search(self._log.read_text(errors="replace"))
            if found and self._healthy(int(found[1])):
                return int(found[1])
            time.sleep(0.1)
        raise PeerError(f"it did not come up in time; {self._log} has what it said")

    @staticmethod
    def _healthy(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code != 503  # which says that it is still loading
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=60) as answer:
            found: bytes = answer.read()
            return found

    def busy(self) -> dict[str, float]:
        """Return the gauges of running or waiting requests that are not zero."""
        return gauges(self.get("/metrics").decode())

    def resident(self) -> int:
        """Return its resident memory in bytes, or 0 once it has ended."""
        try:
            return int(self.process.memory_info().rss)
        except psutil.Error:
            return 0

    def close(self, patience: float = 30.0) -> int:
        """End it, by force if need be; returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except psutil.TimeoutExpired:
                self.process.kill()
        return int(self.process.wait())


def gauges(metrics: str) -> dict[str, float]:
    found = (line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#"))
    named = {name: float(value) for name, _, value in found if name.split("{")[0].endswith(("_running", "_waiting"))}
    return {name: value for name, value in named.items() if value}


def ours(
    target: Path,
    drafter: Path | str | None,
    log: Path,
    threads: int,
    more: Sequence[str] = (),
    module: str = "blockdraft",
) -> Server:
    """Start `blockdraft serve`, or another module with its command line. It refuses to run uncompiled.

    Args:
        drafter: None leaves the choice to the server.
    """
    command = [sys.executable, "-m", module, "serve", "--port", "0", "--threads", threads, "--compile", "on"]
    named = () if drafter is None else ("--drafter", drafter)
    return Server([*command, "--target", target, *named, *more], log, threads)


def llama(
    model: Path,
    drafter: Path | None,
    log: Path,
    threads: int,
    parallel: int,
    length: int,
    more: Sequence[str] = (),
) -> Server:
    """Start llama-server with room for some requests of a length; with a drafter it drafts."""
    command: list[object] = [LLAMA_SERVER, "--model", model, "--host", HOST, "--port", 0, "--threads", threads]
    command += ["--threads-batch", threads, "--parallel", parallel, "--ctx-size", parallel * length]
    command += ["--cache-ram", 0, "--no-webui"]
    if drafter is not None:
        command += ["--model-draft", drafter, "--spec-type", "draft-dflash"]
    return Server([*command, *more], log, threads)
