import threading
import time

import pytest

from blockdraft import timing
from blockdraft.timing import COMMIT, FORWARD, OBSERVE, PARTS, Cycle, listening, mark


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is on it; the first of these times is what is read next."""
    times: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: times.pop(0))
    return times


def test_time_goes_to_the_part_that_ends(clock: list[float]) -> None:
    clock += [0.0, 1.0, 3.0, 10.0]
    with Cycle() as cycle:
        mark(FORWARD)
        mark(COMMIT)
        mark(FORWARD)
    assert cycle.seconds == {FORWARD: 1.0 + 7.0, COMMIT: 2.0}
    assert (cycle.total, cycle.of([COMMIT]), cycle.of([COMMIT, FORWARD, OBSERVE])) == (10.0, 2.0, 10.0)


def test_who_listens_hears_the_sum_of_cycles_and_waits_for_them(clock: list[float]) -> None:
    clock += [0.0, 1.0, 20.0, 23.0, 24.0]
    waited = []
    with listening(lambda: waited.append(1)) as seconds:
        with Cycle():
            mark(FORWARD)
        with Cycle():
            mark(FORWARD)
            mark(COMMIT)
    assert {part: spent for part, spent in seconds.items() if spent} == {FORWARD: 1.0 + 3.0, COMMIT: 1.0}
    assert tuple(seconds) == PARTS and len(waited) == 3


def test_nobody_hears_what_is_no_cycle_nor_one_that_failed(clock: list[float]) -> None:
    clock += [0.0, 1.0]
    with listening() as seconds:
        mark(FORWARD)
        with pytest.raises(KeyError), Cycle():
            mark(FORWARD)
            raise KeyError
        mark(COMMIT)
    assert not any(seconds.values())


def test_a_cycle_that_began_before_is_not_heard(clock: list[float]) -> None:
    clock += [0.0, 1.0]
    with Cycle() as cycle:
        with listening(lambda: pytest.fail("not for this one")) as seconds:
            pass
        mark(FORWARD)
    assert cycle.total == 1.0 and not any(seconds.values())


def test_threads_have_cycles_of_their_own() -> None:
    inner: list[Cycle] = []

    def other() -> None:
        mark(COMMIT)  # outside of any cycle, of this thread
        with Cycle() as cycle:
            mark(OBSERVE)
        inner.append(cycle)

    with Cycle() as cycle:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mark(FORWARD)
    assert (list(cycle.seconds), list(inner[0].seconds)) == ([FORWARD], [OBSERVE])


def test_listening_ends_with_its_block() -> None:
    with pytest.raises(KeyError), listening():
        raise KeyError
    assert timing._listener is None
    with listening(), pytest.raises(AssertionError, match="one listener"), listening():
        pass
