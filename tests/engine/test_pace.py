import pytest

from blockdraft.engine.pace import Pace


def test_cycles_of_about_as_many_guesses_are_corrected_most() -> None:
    pace = Pace(256)
    assert pace.cycle([2.0] * 257) == [2.0] * 257
    for _ in range(40):
        pace.learn(32, seconds=3.0, expected=2.0)
    found = pace.cycle([2.0] * 257)
    assert found[32] == pytest.approx(3.0, rel=0.05) and found[1] < 2.2
    assert [pace.at(guesses, [2.0] * 257) for guesses in range(257)] == found
    assert found[1] == found[0] < found[8] < found[16] < found[32] > found[64] > found[256] > 2.0
    assert pace.plain == 1.0


def test_plain_cycles_are_apart() -> None:
    pace = Pace(15)
    for _ in range(100):
        pace.learn(None, seconds=0.8, expected=1.0)
    assert pace.plain == pytest.approx(0.8, rel=0.01) and pace.cycle([1.0] * 16) == [1.0] * 16


def test_a_stray_delay_counts_little() -> None:
    pace = Pace(7)
    pace.learn(4, seconds=100.0, expected=1.0)
    assert max(pace.cycle([1.0] * 8)) < 1.11


def test_one_guess_and_none() -> None:
    pace = Pace(1)
    pace.learn(0, seconds=1.2, expected=1.0)
    pace.learn(1, seconds=1.2, expected=1.0)
    found = pace.cycle([1.0, 1.0])
    assert found[0] == found[1] > 1.0
    assert Pace(0).cycle([1.0]) == [1.0]
