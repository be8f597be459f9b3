import threading
import time
from collections.abc import Mapping

import pytest

from blockdraft.timing import COMMIT, FORWARD, OBSERVE, PARTS, StepTimer, listening, mark


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is on it; the first of these times is what is read next."""
    times: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: times.pop(0))
    return times


def spent(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: value for part, value in seconds.items() if value}


def test_time_goes_to_the_part_that_ends(clock: list[float]) -> None:
    clock += [0.0, 1.0, 3.0, 10.0]
    with StepTimer() as timer:
        mark(FORWARD)
        mark(COMMIT)
        mark(FORWARD)
    assert spent(timer.seconds) == {FORWARD: 1.0 + 7.0, COMMIT: 2.0}
    assert (timer.total, timer.of([COMMIT]), timer.of([COMMIT, FORWARD, OBSERVE])) == (10.0, 2.0, 10.0)


def test_listener_gets_the_sum_of_steps(clock: list[float]) -> None:
    clock += [0.0, 1.0, 20.0, 23.0, 24.0]
    waited = []
    with listening(lambda: waited.append(1)) as seconds:
        with StepTimer():
            mark(FORWARD)
        with StepTimer():
            mark(FORWARD)
            mark(COMMIT)
    assert spent(seconds) == {FORWARD: 1.0 + 3.0, COMMIT: 1.0}
    assert tuple(seconds) == PARTS and len(waited) == 3


def test_threads_have_steps_of_their_own() -> None:
    inner: list[StepTimer] = []

    def other() -> None:
        mark(COMMIT)  # outside of any step, of this thread
        with StepTimer() as timer:
            mark(OBSERVE)
        inner.append(timer)

    with StepTimer() as timer:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mark(FORWARD)
    assert (list(spent(timer.seconds)), list(spent(inner[0].seconds))) == ([FORWARD], [OBSERVE])
