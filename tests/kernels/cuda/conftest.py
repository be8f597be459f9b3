"""Fixtures of captured forward passes."""

from collections.abc import Callable

import pytest
from thinned import LONG


@pytest.fixture
def small_buckets(constants: Callable[..., None]) -> None:
    """Let short sequences fill several buckets."""
    constants("blockdraft.nn.cache", MIN_SLOTS=32)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=LONG)])
def backend(request: pytest.FixtureRequest, constants: Callable[..., None]) -> None:
    """Let torch.compile trace functions, and with `make test-long` compile the C++ of what it has traced too."""
    constants("blockdraft.kernels.cuda.compiler", BACKEND=request.param)
