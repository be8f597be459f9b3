"""A started engine does not outlive the command."""

import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from blockdraft.errors import UsageError
from blockdraft.tools.deploy.launch import Running


def engine(folder: Path) -> list[str]:
    """A program that never answers, and writes its process id to a file."""
    script = folder / "engine"
    script.write_text(f"#!/bin/sh\necho $$ > {folder}/own.new\nmv {folder}/own.new {folder}/own\nexec sleep 60\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return [str(script)]


def test_an_engine_ends_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, SIGTERM, which service managers send, would leave the engine running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    asked, own, heard = httpx.get, tmp_path / "own", list[int]()

    def ended_meanwhile(*args: Any, **kwargs: Any) -> Any:
        if own.is_file():
            signal.raise_signal(signal.SIGTERM)
        return asked(*args, **kwargs)

    monkeypatch.setattr(httpx, "get", ended_meanwhile)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            Running(engine(tmp_path), port, 60)
        assert not psutil.pid_exists(int(own.read_text()))
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]  # as it was before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_an_engine_may_be_started_in_any_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as other, pytest.raises(UsageError, match="did not answer"):
        other.submit(Running, engine(tmp_path), 1, 3).result()
    assert not psutil.pid_exists(int((tmp_path / "own").read_text()))
