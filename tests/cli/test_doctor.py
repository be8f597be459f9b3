"""`blockdraft doctor` as a command; what it finds is tested in tests/tools/deploy."""

from collections.abc import Callable
from typing import Any

import pytest

from blockdraft.cli.options import TargetOptions
from blockdraft.errors import UsageError


def test_the_drafter_is_not_rounded(blockdraft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(run: TargetOptions, *_: object) -> None:
        raise UsageError(f"{run.target}, rounded: {run.round_drafters}")

    monkeypatch.setattr(TargetOptions, "load", load)
    for words in ((), ("--round-drafter",)):
        assert blockdraft("doctor", *words).err == "error: bundled, rounded: False\n"
