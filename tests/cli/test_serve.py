"""`blockdraft serve`: its options, and what it refuses before it loads anything."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "set BLOCKDRAFT_API_KEY, or add --allow-open"),
        (["--port", "70000"], "--port must be from 0"),
        (["--max-batch-size", "0"], "--max-batch-size must be at least 1, got '0'"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--served-model-name", " "], "--served-model-name holds an empty name"),
        (["--record-hidden-states"], "--record-hidden-states has no folder; add --record DIR"),
        (["--record", "R", "--record-hidden-states", "--drafter", "lookup"], "drafter lookup reads no hidden states"),
        (["--record", "R", "--record-bytes", "9"], "--record-bytes must be at least 1048576"),
        (["--record", "/dev/null/R"], "/dev/null is no folder; choose another --record"),
        (["--target", "/no/such/model", "--drafter", "none"], "/no/such/model"),
    ],
)
def test_bad_options(arguments: list[str], message: str, blockdraft: Run) -> None:
    code, _, err = blockdraft("serve", "--port", "0", *arguments)
    assert code == 2 and message in err


def test_lacking_packages_are_named(monkeypatch: pytest.MonkeyPatch, blockdraft: Run) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'blockdraft[server]'" in blockdraft("serve").err


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, blockdraft: Run) -> None:
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", " ")
    assert "--api-key is empty" in blockdraft("serve").err
