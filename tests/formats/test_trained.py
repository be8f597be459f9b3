"""Training information in drafter files."""

from __future__ import annotations

from typing import Any

import pytest

from blockdraft.formats.trained import UNKNOWN, Trained


@pytest.mark.parametrize("trained", [UNKNOWN, Trained("abc"), Trained(None, 4), Trained("abc", 8)])
@pytest.mark.parametrize("prefix", ["", "blockdraft."])
def test_there_and_back(trained: Trained, prefix: str) -> None:
    values = trained.values(prefix)
    assert None not in values.values() and all(key.startswith(prefix) for key in values)
    assert Trained.read({"hidden_size": 8, **values}, prefix) == trained


@pytest.mark.parametrize("raw", [[], None, {"target_fingerprint": 3}, *({"qat_bits": x} for x in (3, "4", 4.0, True))])
def test_other_values_are_unknown(raw: Any) -> None:
    assert Trained.read(raw) == UNKNOWN
