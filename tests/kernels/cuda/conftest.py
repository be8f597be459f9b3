"""Fixtures of captured forward passes."""

import pytest


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short sequences fill several buckets."""
    monkeypatch.setattr("blockdraft.nn.cache.MIN_SLOTS", 32)
