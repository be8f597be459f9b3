"""Fixtures of captured forward passes."""

from collections.abc import Callable

import pytest


@pytest.fixture
def small_buckets(constants: Callable[..., None]) -> None:
    """Let short sequences fill several buckets."""
    constants("blockdraft.nn.cache", MIN_SLOTS=32)
