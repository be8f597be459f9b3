"""`blockdraft doctor` as a command; what it finds is tested in tests/tools/doctor."""

from collections.abc import Callable
from typing import Any

import pytest

from blockdraft.drafters import TINY_DRAFTER


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--drafter", "bundled", "--round-drafter", "--json"), marks=pytest.mark.long)]
)
def test_the_bundled_pair_has_no_fault(words: tuple[str, ...], blockdraft: Callable[..., Any]) -> None:
    """The pair is examined whatever was pulled, and the drafter is not quantized, or decoding would differ."""
    done = blockdraft("doctor", *words)
    assert done.code == 0 and f", drafter {TINY_DRAFTER}.\nThreads: " in done.err
    assert "check of the checkpoint" in done.out or '"fault": null' in done.out
