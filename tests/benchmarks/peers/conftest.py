import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parent)]

from benchmarks.peers.trials import Task  # noqa: E402


@pytest.fixture
def tasks() -> list[Task]:
    return [Task("set", i, (10 + i, 20, 30)) for i in range(3)]
