"""An engine that was started does not outlive the command."""

import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from blockdraft.deploy.launch import Running
from blockdraft.deploy.push import Known, prepare
from blockdraft.errors import UsageError
from blockdraft.targets import BUNDLED


def test_an_engine_ends_with_the_command(tmp_path: Path) -> None:
    """SIGTERM, which service managers send, would else leave it behind."""
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/own\nsleep 0.3\nkill -TERM $PPID\nexec sleep 60\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            Running([str(script)], port, 20)
        assert not psutil.pid_exists(int((tmp_path / "own").read_text()))
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]  # as it was before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_engine_may_be_started_in_any_thread(tmp_path: Path) -> None:
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/own\nexec sleep 60\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    with ThreadPoolExecutor(1) as other, pytest.raises(UsageError, match="did not answer"):
        other.submit(Running, [str(script)], 1, 0.5).result()
    assert not psutil.pid_exists(int((tmp_path / "own").read_text()))


def test_the_bundled_drafter_can_be_pushed(tmp_path: Path) -> None:
    prepare("bundled", str(BUNDLED), tmp_path / "out", None, Known(None, (), None))
    assert "2 layers and 1.4 M parameters" in (tmp_path / "out/README.md").read_text()
