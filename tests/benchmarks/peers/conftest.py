import pytest

from benchmarks.peers.trials import Task


@pytest.fixture
def tasks() -> list[Task]:
    return [Task("set", i, (10 + i, 20, 30)) for i in range(3)]
