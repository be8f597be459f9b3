"""`blockdraft doctor` as a command; what it finds is tested in tests/tools/doctor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli.target import DecodingSettings
from blockdraft.drafters import BUNDLED_DFLASH, bundled
from blockdraft.errors import UsageError


def test_the_drafter_is_not_rounded(blockdraft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(run: DecodingSettings, *_: object) -> None:
        raise UsageError(f"{run.target}, rounded: {run.round_drafters}")

    monkeypatch.setattr(DecodingSettings, "load_for", load)
    for words in ((), ("--round-drafter",)):
        assert blockdraft("doctor", *words).err == "error: bundled, rounded: False\n"


def test_bundled_drafters_have_names(blockdraft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(target: Any, drafter: Path, *_: object) -> None:
        raise UsageError(f"examined {drafter}")

    monkeypatch.setattr("blockdraft.tools.doctor.examine.examine", examine)
    dflash = bundled()[BUNDLED_DFLASH]
    for words in ((), ("--drafter", "bundled"), ("--drafter", "bundled-dflash")):
        told = blockdraft("doctor", *words).err
        assert f", drafter {dflash}.\n" in told and told.endswith(f"error: examined {dflash}\n")
