"""Requests of the simulated user: always the same, and none that is held out is about a file of the others."""

from pathlib import Path

import pytest
from benchmarks import own_traffic

FUNCTION = """def method_{number}(self, value):
    '''Return a number that depends on the value and on where the function stands in the file.'''
    total = 0
    for step in range(value):
        total += step * {number}
        if total > 1000:
            raise ValueError("too much")
    return total


"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text("".join(FUNCTION.format(number=number) for number in range(3)))
    (tmp_path / "short.py").write_text("def f():\n    return 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


def test_requests(repository: Path) -> None:
    recorded, held_out = own_traffic.requests(repository, 0)
    assert (len(recorded), len(held_out)) == (own_traffic.RECORDED, own_traffic.HELD_OUT)
    assert (recorded, held_out) == own_traffic.requests(repository, 0) != own_traffic.requests(repository, 1)
    opening = [[messages[0] for messages in part] for part in (recorded, held_out)]
    files = [{text.split("`")[1] for text in part} for part in opening]
    assert files[0] and files[1] and not files[0] & files[1] and not files[0] & {"short.py", "broken.py"}
    kinds = [kind for kind, asks in own_traffic.ASKS.items() if any(text.startswith(asks) for text in opening[0])]
    assert kinds == list(own_traffic.ASKS)
    assert {len(messages) for messages in recorded} == {1, 2}
    diffs = [text for text in opening[0] if "```diff" in text]
    assert diffs and all("\n+" in diff for diff in diffs)


def test_a_small_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds 0 Python files with functions"):
        own_traffic.requests(tmp_path, 0)
