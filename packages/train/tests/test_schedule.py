"""Rates over runs that end early or go on."""

import pytest

from blockdraft_train.recipe import Recipe
from blockdraft_train.schedule import Schedule, rate

RECIPE = Recipe(warmup=0.1, final=0.05)


def rates(schedule: Schedule, begin: int = 0) -> list[float]:
    return [schedule.rate(step) for step in range(begin, schedule.end)]


def test_a_plain_run_is_the_recipes() -> None:
    schedule = Schedule(50, RECIPE)
    assert rates(schedule) == [rate(step, 50, RECIPE) for step in range(50)]
    schedule.go_on(20, 50, 0)
    assert schedule.end == 50


def test_when_asked_to_finish_the_rates_fall_within_a_tenth_of_the_steps() -> None:
    schedule = Schedule(1000, RECIPE)
    before = rates(schedule)
    schedule.finish(200)
    assert schedule.finishing and schedule.end == 220
    shortened = rates(schedule)
    assert shortened[:200] == before[:200]
    falls = [rate - other for rate, other in zip(shortened[199:], shortened[200:], strict=False)]
    assert min(falls) > 0 and max(falls) == pytest.approx(min(falls)) and shortened[-1] == pytest.approx(0.05)
    schedule.finish(210)  # a second request
    assert schedule.end == 220
    again = Schedule(1000, RECIPE, schedule.saved())
    assert again.finishing and rates(again) == shortened


def test_a_fall_is_short_and_never_longer_than_the_run() -> None:
    for done, end in ((1, 2), (0, 1), (5000, 5100), (9995, 10000)):
        schedule = Schedule(10000, RECIPE)
        schedule.finish(done)
        assert schedule.end == end


def test_a_run_that_ended_goes_on_with_a_schedule_of_its_own() -> None:
    schedule = Schedule(40, RECIPE)
    schedule.go_on(40, 100, 0)
    assert schedule.end == 100 and rates(schedule, 40) == [rate(step, 60, RECIPE) for step in range(60)]
    again = Schedule(100, RECIPE, schedule.saved())
    again.go_on(70, 100, 0)  # interrupted meanwhile
    assert rates(again) == rates(schedule)
    again.go_on(100, 100, 0)  # it has ended
    assert again.end == 100
    again.go_on(100, 100, 30)
    again.go_on(110, 100, 30)  # interrupted: no thirty more
    assert again.end == 130
    again.go_on(130, 100, 30)
    assert again.end == 160


def test_a_run_that_finished_early_goes_on_when_more_is_asked_for() -> None:
    schedule = Schedule(1000, RECIPE)
    schedule.finish(200)
    schedule.go_on(220, 1000, 0)
    assert schedule.end == 220  # the same command
    schedule.go_on(220, 1001, 0)
    assert schedule.end == 1001 and not schedule.finishing


def test_a_run_under_way_keeps_its_steps() -> None:
    with pytest.raises(ValueError, match="at step 20 of 40 and another number of steps is requested"):
        Schedule(40, RECIPE).go_on(20, 60, 0)
    with pytest.raises(ValueError, match="at step 20 of 40"):
        Schedule(40, RECIPE).go_on(20, 40, 10)
    with pytest.raises(ValueError, match="has done 40 steps and 30 are requested now instead of 40"):
        Schedule(40, RECIPE).go_on(40, 30, 0)


def test_rates_rise_and_fall() -> None:
    cosine = [rate(step, 100, Recipe(warmup=0.1)) for step in range(100)]
    assert cosine[:3] == pytest.approx([0.1, 0.2, 0.3]) and cosine[9] == pytest.approx(1.0)
    assert cosine[55] == pytest.approx(0.5) and 0 < cosine[99] < 0.01
    assert all(later <= earlier for earlier, later in zip(cosine[10:], cosine[11:], strict=False))
    linear = [rate(step, 100, Recipe(warmup=0.1, schedule="linear", final=0.2)) for step in range(100)]
    assert linear[55] == pytest.approx(0.6) and linear[99] == pytest.approx(0.2, abs=0.02)
    wsd = [rate(step, 100, Recipe(warmup=0.1, schedule="wsd")) for step in range(100)]
    assert set(wsd[10:81]) == {1.0} and wsd[90] == pytest.approx(0.5) and wsd[99] < 0.01
    assert rate(0, 1, Recipe(warmup=0)) == 1
