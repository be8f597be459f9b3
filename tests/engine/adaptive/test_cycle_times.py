import math
import random

import pytest

from blockdraft.engine.adaptive.cycle_times import Pace, isotonic, sizes

CURVE = [1.2 + 0.05 * n for n in range(257)]


def pace(variance: float = 0.5, most: int = 15) -> Pace:
    return Pace(lambda rows: (1.0, CURVE[: most + 1], variance), most)


def settled(most: int = 15, variance: float = 0.5) -> Pace:
    """One whose cycles took what was expected so far."""
    found = pace(variance, most)
    for _ in range(5):
        found.learn(1, None, 1.0)
    return found


def relative(found: Pace, guesses: int, rows: int = 1) -> float:
    plain, curve = found.of(rows).expected()
    return curve[guesses] / plain


def test_sizes_are_single_at_first_and_then_in_steps() -> None:
    assert sizes(15) == list(range(16))
    assert sizes(1) == [0, 1]
    found = sizes(256)
    assert found[:18] == [*range(17), 20] and found[-1] == 256 and len(found) < 32
    assert all(b <= 1.26 * a for a, b in zip(found[16:], found[17:], strict=False))


def test_more_work_never_takes_less_time() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([1.0, 9.0, 2.0], [1.0, 0.01, 99.99]) == pytest.approx([1.0, 2.0007, 2.0007], abs=1e-4)
    assert isotonic([3.0, 2.0, 1.0], [1.0, 1.0, 2.0]) == [1.75] * 3


def test_a_trial_counts_fully() -> None:
    found = settled()
    found.learn(1, 8, 0.8 * CURVE[8])
    assert relative(found, 8) == pytest.approx(0.8 * CURVE[8], rel=0.02)
    # And again when it was long ago, however often the size was tried before.
    for _ in range(50):
        found.learn(1, 8, CURVE[8])
    for _ in range(5000):
        found.learn(1, None, 1.0)
    found.learn(1, 8, 0.8 * CURVE[8])
    assert relative(found, 8) < 0.85 * CURVE[8]


def test_one_trial_tells_something_of_the_sizes_near_it() -> None:
    found = settled()
    found.learn(1, 4, 0.6 * CURVE[4])
    changes = [relative(found, n) / CURVE[n] for n in range(16)]
    assert changes[4] < changes[5] < changes[8] < changes[15] < 0.95


@pytest.mark.parametrize("known", [True, False])
def test_stray_delays_are_no_news(known: bool) -> None:
    found = settled()
    for _ in range(100 if known else 0):
        found.learn(1, 4, CURVE[4])
    for _ in range(20):  # one in three cycles
        found.learn(1, 4, 30 * CURVE[4])
        found.learn(1, 4, CURVE[4])
        found.learn(1, None, 1.0)
    assert relative(found, 4) == pytest.approx(CURVE[4], rel=0.02)


def test_what_lasts_is_followed() -> None:
    found = settled()
    for _ in range(200):
        found.learn(1, 4, CURVE[4])
        found.learn(1, None, 1.0)
    for _ in range(40):
        found.learn(1, 4, 1.6 * CURVE[4])
        found.learn(1, None, 1.0)
    assert relative(found, 4) > 1.5 * CURVE[4]


def test_a_slow_beginning_does_not_set_the_scale() -> None:
    found = pace()
    found.learn(1, 4, 500.0)  # compiles, allocates
    for _ in range(3):
        found.learn(1, 4, 1e-3 * CURVE[4])
    found.learn(1, None, 1e-3)
    assert relative(found, 4) == pytest.approx(CURVE[4], rel=0.05)


def test_noise_does_not_move_what_is_not_tried() -> None:
    found, rng = settled(), random.Random(0)
    for guesses in (None, 4, 8):
        for _ in range(5):
            found.learn(1, guesses, CURVE[guesses] if guesses else 1.0)
    for _ in range(2000):
        found.learn(1, 4, CURVE[4] * math.exp(rng.gauss(0, 0.1)))
    assert relative(found, 8) == pytest.approx(CURVE[8], rel=0.1)
    assert relative(found, 4) == pytest.approx(CURVE[4], rel=0.1)


def test_the_least_is_lower_where_less_is_known_and_grows_no_lower_than_smaller_sizes_allow() -> None:
    found = settled()
    for _ in range(5):
        found.learn(1, 4, CURVE[4])
    times = found.of(1)
    _, now = times.least(found.now)
    _, later = times.least(found.now + 1000)
    _, expected = times.expected()
    assert 0.85 * expected[4] < now[4] < expected[4]
    assert later[4] < now[4]
    assert now == sorted(now) and now[3] < 0.8 * expected[3]
    assert now[5] >= now[4]


def test_nothing_is_expected_far_beyond_what_is_known() -> None:
    found = pace(variance=1.0, most=256)
    assert len(found.of(1).expected()[1]) == 3
    for _ in range(5):
        found.learn(1, 2, CURVE[2])
    assert 6 < len(found.of(1).expected()[1]) < 25
    assert len(pace(variance=0.5, most=256).of(1).expected()[1]) == 257


def test_a_size_in_between_stands_for_the_nearest() -> None:
    found = settled(most=256)
    for _ in range(10):
        found.learn(1, 33, 0.7 * CURVE[33])
    assert relative(found, 33) == pytest.approx(0.7 * CURVE[33], rel=0.02)
    assert sizes(256)[18:21] == [25, 31, 38]


def test_any_size_can_be_learned_wherever_the_times_end() -> None:
    """The nearest size may lie beyond the end, and a drafter may make more guesses than it was given times for."""
    for known in range(17):
        found = pace(variance=1.0, most=256)
        times = found.of(1)
        times._variances[1 + known] = 0.1
        assert len(times.expected()[1]) == 2 * known + 3
        for guesses in range(257):
            assert times.error(guesses, math.log(CURVE[guesses])) == pytest.approx(0.0, abs=0.12)


def test_what_was_learned_of_one_number_of_rows_helps_with_another() -> None:
    found = settled()
    for _ in range(10):
        for guesses in (2, 4, 8):
            found.learn(1, guesses, 0.5 * CURVE[guesses] + 0.5)
    assert relative(found, 4, rows=2) < 0.9 * CURVE[4]
    assert relative(found, 4, rows=2) < relative(found, 4, rows=32) < CURVE[4]


def test_what_was_learned_is_in_seconds() -> None:
    found = pace(variance=1.0)
    for _ in range(30):
        found.learn(2, None, 0.004)
        found.learn(2, 3, 0.007)
    plain, points = found.learned()[2]
    assert plain == pytest.approx(0.004, rel=0.02)
    assert dict(points)[3] == pytest.approx(0.007, rel=0.02)
