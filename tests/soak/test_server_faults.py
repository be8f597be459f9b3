"""`blockdraft serve` under faults of clients and of the engine."""

from pathlib import Path

import pytest
from server_faults import run


@pytest.mark.long
def test_bystanders_get_their_answers(tmp_path: Path) -> None:
    assert run(tmp_path) == []
