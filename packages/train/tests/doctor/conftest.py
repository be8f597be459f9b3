"""What holds for all tests of the doctor."""

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def few_anchors(constants: Callable[..., None]) -> None:
    """A third of the usual ones: conventions that are broken show in any of them."""
    constants("blockdraft_train.doctor.examine", ANCHORS=16)
