"""The benchmark of completions while typing: its sessions and its table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.typing.__main__ import (
    AGENT,
    ALONE,
    BEFORE,
    BEHIND,
    BESIDE,
    KEYS,
    OURS,
    PAUSE,
    THEIRS,
    Run,
    report,
    sessions_of,
)

CODE = "".join(
    f"def function_{i}(argument):\n    value = argument + {i}\n    return value * {i}\n\n\n" for i in range(99)
)


def test_sessions_are_lines_of_long_files(tmp_path: Path) -> None:
    files = tmp_path / "files.jsonl"
    texts = [CODE, "too short", CODE.replace("value", "number")]
    files.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sessions = sessions_of(files, 3)
    assert sessions == sessions_of(files, 3) and len(set(sessions)) == 3
    for session in sessions:
        text = session.before + session.line + "\n" + session.behind
        assert text in CODE or text in texts[2]
        assert BEFORE - 72 <= len(session.before) <= BEFORE and BEHIND <= len(session.behind) <= BEHIND + 72
        request = session.request(3)
        assert request["prompt"] == session.line[: session.indent + 3]


def test_the_report_shows_both_servers(tmp_path: Path) -> None:
    runs = [
        Run("model", server, load, session, keys, seconds * session, 10, 1)
        for server, seconds in ((OURS, 1.0), (THEIRS, 2.0))
        for load in (ALONE, BESIDE)
        for session in (1, 2, 3)
        for keys in range(PAUSE, KEYS + 1, PAUSE)
    ]
    runs += [Run("model", OURS, AGENT, 1, keys, 2.0, 10, 0) for keys in (0, 2, 4)]
    report(runs, tmp_path)
    page = (tmp_path / "typing.md").read_text()
    assert "| model | alone | blockdraft | 2.00 | 3.00 | 100% | - | 18 |" in page
    assert "| model | beside a chat | llama-server | 4.00 | 6.00 | 100% | - | 18 |" in page
    assert "| model | beside an agent | blockdraft | 2.00 | 2.00 | 0% | 5.0 | 2 |" in page
    assert (tmp_path / "typing.png").stat().st_size > 1000
