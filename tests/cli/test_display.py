"""Lines of the log."""

import io
import logging
import re

import pytest

from blockdraft.cli.display import LogLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    log = logging.Logger("a logger")
    log.addHandler(LogLines())
    log.info("before")
    for number in (1, 2, 3):
        log.info("read %d", number, extra={"progress": True})
    log.info("after")
    return re.sub(r"\d\d:\d\d:\d\d", "TIME", stream.getvalue())


def test_progress_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    erase = "\r\x1b[K"
    expected = f"TIME before\nTIME read 1{erase}TIME read 2{erase}TIME read 3{erase}TIME after\n"
    assert logged(Terminal(), monkeypatch) == expected


def test_elsewhere_a_line_of_progress_is_printed_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(io.StringIO(), monkeypatch) == "TIME before\nTIME read 1\nTIME after\n"
