"""`blockdraft doctor` as a command; what it finds is tested in tests/tools/doctor."""

from collections.abc import Callable
from typing import Any

import pytest

from blockdraft.drafters import TINY_DRAFTER


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--drafter", "bundled", "--round-drafter", "--json"), marks=pytest.mark.long)]
)
def test_the_bundled_pair_has_no_fault(
    words: tuple[str, ...], blockdraft: Callable[..., Any], constants: Callable[..., None]
) -> None:
    """The pair is examined whatever was pulled, and the drafter is not quantized, or decoding would differ."""
    constants("blockdraft_train.doctor.examine", ANCHORS=16)
    done = blockdraft("doctor", "--max-new-tokens", "48", *words)
    assert done.code == 0 and f", drafter {TINY_DRAFTER}.\nThreads: " in done.err
    assert "check of the checkpoint" in done.out or '"fault": null' in done.out
