import time

import pytest

from blockdraft import timing
from blockdraft.timing import COMMIT, FORWARD, PARTS, listening, mark, unheard


def test_time_goes_to_the_part_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    waited = []
    with listening(lambda: waited.append(1)) as seconds:
        mark(FORWARD)
        mark(COMMIT)
        mark(None)
        mark(FORWARD)
    assert {part: spent for part, spent in seconds.items() if spent} == {FORWARD: 1.0 + 4.0, COMMIT: 2.0}
    assert tuple(seconds) == PARTS and len(waited) == 4


def test_nobody_hears_what_is_no_cycle() -> None:
    with listening() as seconds:
        with unheard():
            time.sleep(0.01)
            mark(FORWARD)
        assert not any(seconds.values())
        mark(COMMIT)
    assert 0 < seconds[COMMIT] < 0.01


def test_listening_ends_with_its_block() -> None:
    with pytest.raises(KeyError), listening():
        raise KeyError
    assert timing._listener is None
    mark(FORWARD)
    with listening(), pytest.raises(AssertionError, match="one listens"), listening():
        pass
