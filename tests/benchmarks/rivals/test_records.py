import pytest

from benchmarks.rivals.records import Way, parse, ways_of
from blockdraft.errors import UsageError
from blockdraft.types import Drafting


def test_ways_are_cut_to_what_a_drafter_can_do() -> None:
    wanted = [parse(name) for name in ("chain:3", "chain:5", "chain:7", "tree:16")]
    assert ways_of(wanted, 8, True) == wanted
    assert ways_of(wanted, 5, False) == [Way(False, 3), Way(False, 4)]
    assert Way(False, 3).drafting(8) == Drafting(4) and Way(True, 16).drafting(8) == Drafting(8, 16)
    assert Way(True, 16).plan(8, 2).tree_budget == 16 and len(Way(True, 16).plan(8, 2).params) == 2
    assert Way(False, 9).plan(8, 1).block_size == 8


@pytest.mark.parametrize("name", ["chain", "chain:0", "bush:3", "tree:auto"])
def test_other_ways_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"Way '{name}' is unknown"):
        parse(name)
