import math
import random

import numpy as np
import pytest

from blockdraft.engine.adaptive.estimates import Acceptance, Slowdown, StepTimes
from blockdraft.engine.request import Request
from blockdraft.types import SamplingParams

SIZES = [0, 1, 2, 3, 4, 5, 7, 11, 15]
PRIOR = [1.0, *(1.2 + 0.05 * n for n in SIZES)]
FOUR, FIVE = 1 + SIZES.index(4), 1 + SIZES.index(5)


def request() -> Request:
    return Request(prompt=[1], params=SamplingParams(9))


def fed(accepted: int, steps: int = 300) -> tuple[Acceptance, Request]:
    """What is known after steps of a request of which so many of three draft tokens were accepted."""
    found, row = Acceptance(4), request()
    for _ in range(steps):
        found.age()
        found.learn_chains([row], [3], [accepted])
    return found, row


def test_chains_yield_as_many_tokens_as_were_accepted_at_each_position() -> None:
    assert Acceptance(3).chain_tokens() == pytest.approx([1, 1.6, 1.96, 2.176])
    found = fed(2)[0].chain_tokens()
    one, two, three = (more - less for less, more in zip(found[:3], found[1:4], strict=True))
    assert one > two > 0.8 > 0.2 > three


def test_what_was_never_reached_borrows_from_the_others() -> None:
    assert fed(3)[0].chain_tokens()[4] > 4.6
    assert fed(0)[0].chain_tokens()[4] < 1.1


def test_a_few_new_draft_tokens_say_much_after_a_long_pause() -> None:
    found, row = fed(0)
    for _ in range(1000):
        found.age()
    before = found.chain_tokens()[3]
    found.learn_chains([row], [3], [3])
    assert before < 1.1 and 1.3 < found.chain_tokens()[3] < 3


def test_upper_bounds_are_above_what_is_expected_and_rise_as_evidence_fades() -> None:
    found, _ = fed(1, steps=60)
    upper_bound, expected = found.upper_bounds(), found.chain_tokens()
    assert all(more > less + 0.05 for more, less in zip(upper_bound[1:], expected[1:], strict=True))
    for _ in range(100):
        found.age()
    assert found.upper_bounds()[1] - found.chain_tokens()[1] > 1.5 * (upper_bound[1] - expected[1])


def test_calibration_is_the_share_of_what_was_expected() -> None:
    for expected, length, calibration in ((4.0, 2, 0.5), (2.0, 3, 1.5)):
        found = Acceptance(4)
        for _ in range(300):
            tokens = found.learn_expected(expected, length)
        assert found.calibration == pytest.approx(calibration, rel=0.05) and tokens == pytest.approx(
            1 + length, rel=0.05
        )
    found = Acceptance(4)
    for _ in range(3000):  # steps of which nothing is expected say nothing
        found.learn_expected(1e-4, 0)
    assert found.calibration > 0.9


def test_what_a_drafter_expects_that_computed_nonsense_is_forgotten() -> None:
    found = Acceptance(4)
    for number in (float("nan"), float("inf"), None):
        assert found.learn_expected(number, 2) == 3.0
    assert found.calibration == 1.0


def test_what_is_known_of_a_request_is_kept_apart_from_what_is_known_of_all() -> None:
    found, good = fed(3)
    bad = request()
    assert found.share(bad) == 1.0
    for _ in range(100):
        found.age()
        found.learn_chains([good, bad], [3, 3], [3, 0])
    assert found.share(bad) < 0.7 < 1.2 < found.share(good)


def test_means_follow_what_drafters_choose() -> None:
    found, row = Acceptance(15), request()
    found.learn_choice({row: 3.0}, 6, 4)
    assert (found.tokens, found.num_draft_tokens) == (3.0, 6.0)
    for _ in range(100):
        found.learn_choice({row: 2.0}, 8, 4)
    assert [found.tokens, found.num_draft_tokens, found.depth] == pytest.approx([2.0, 8.0, 4.0], abs=0.01)
    found.learn_choice({row: 2.0}, 8, 12)
    assert found.depth == pytest.approx(8.0, abs=0.01)  # it rises fast


def times() -> StepTimes:
    return StepTimes(SIZES, PRIOR)


def test_before_any_step_the_prior_holds() -> None:
    assert times().expected() == pytest.approx(PRIOR)
    assert times().learned() is None


def test_sizes_that_have_not_run_are_corrected_like_their_neighbours() -> None:
    found = times()
    found.learn(None, 1e-3, 1)
    assert found.expected() == pytest.approx([1e-3 * each for each in PRIOR])
    found.learn(4, 2e-3 * PRIOR[FOUR], 2)
    ratio = np.array(found.expected()) / PRIOR / 1e-3
    assert ratio[0] == pytest.approx(1) and 1.2 < ratio[2] < ratio[3] < 2
    assert ratio[FOUR:] == pytest.approx(2)


def test_stray_delays_are_no_news() -> None:
    found = times()
    for step in range(60):  # one in three
        found.learn(4, PRIOR[FOUR] * (1 if step % 3 else 30), step)
        assert step == 0 or found.expected()[FOUR] == pytest.approx(PRIOR[FOUR])


def test_what_lasts_is_followed() -> None:
    found = times()
    for step in range(110):
        found.learn(4, PRIOR[FOUR] * (1 if step < 100 else 1.6), step)
    assert found.expected()[FOUR] == pytest.approx(1.6 * PRIOR[FOUR])


def test_sizes_between_two_that_have_run_take_no_less_than_the_smaller() -> None:
    found = times()
    found.learn(1, 5.0, 1)
    found.learn(15, 5.0, 2)
    assert np.array(found.expected())[2:] == pytest.approx(5.0)


def test_noise_is_averaged() -> None:
    found, rng = times(), random.Random(0)
    for step in range(300):
        found.learn(4, PRIOR[FOUR] * math.exp(rng.gauss(0, 0.1)), step)
    assert found.expected()[FOUR] == pytest.approx(PRIOR[FOUR], rel=0.1)


def test_more_work_never_takes_less_time() -> None:
    found = times()
    found.learn(4, 9.0, 1)
    found.learn(7, 2.0, 2)  # so what was measured of four draft tokens was a delay, and five take no longer
    seconds = found.expected()
    assert seconds == sorted(seconds) and seconds[FOUR] == seconds[FIVE] == pytest.approx(2.0)
    found.learn(15, 1.0, 3)
    assert found.expected()[FOUR] == pytest.approx(1.0)


def test_the_least_is_lower_where_less_is_known_and_no_lower_than_smaller_sizes_allow() -> None:
    found = times()
    for step in range(5):
        found.learn(4, PRIOR[FOUR], step)
    expected, now, later = found.expected(), found.least(5), found.least(1000)
    assert 0.9 * expected[FOUR] < now[FOUR] < expected[FOUR] and later[FOUR] < 0.8 * expected[FOUR]
    assert now[2] < 0.5 * expected[2] and now[FIVE] == now[-1] == now[FOUR]
    found.learn(15, 50.0, 6)  # may have been a delay
    found.expected()
    assert found.least(7)[-1] < 25.0
    for step in (7, 8):
        found.learn(15, 50.0, step)
    found.expected()
    assert found.least(8)[-1] > 40.0


def test_a_size_in_between_stands_for_the_nearest_below() -> None:
    found = times()
    for step in range(5):
        found.learn(9, 0.7 * (1.2 + 0.05 * 9), step)
        found.expected()
    assert found.at(found.expected(), 9) == pytest.approx(0.7 * 1.65, rel=0.02)
    assert found.learned() is None  # until it is known that nothing disturbed these steps
    found.settle(quiet=True)
    assert found.learned() == (pytest.approx(0.7), ((7, pytest.approx(0.7 * 1.55)),))


def test_disturbed_steps_are_not_learned_for_later_and_undisturbed_ones_before_them_are() -> None:
    found = times()
    for quiet, seconds in ((True, 0.7), (False, 3.0), (False, 0.1)):
        for step in range(40):
            found.learn(None, seconds, step)
            found.learn(3, 2 * seconds, step)
        found.settle(quiet)
        assert found.learned() == (pytest.approx(0.7), ((3, pytest.approx(1.4)),))
    assert found.expected()[0] == pytest.approx(0.1, rel=0.01)  # the policy follows the machine
    for step in range(9):
        found.learn(3, 1.0, step)
    found.settle(quiet=True)
    assert found.learned() == (pytest.approx(0.7), ((3, pytest.approx(1.0)),))


def test_steps_are_judged_every_half_second(other_work: dict[str, float | None]) -> None:
    slowdown = Slowdown()
    found = StepTimes(SIZES, PRIOR, slowdown)
    for cores, seconds in ((1.0, 0.1), (None, 0.7), (0.5, 0.2)):
        other_work["cores"] = cores
        found.learn(None, seconds, 0)
        slowdown.check()
    assert found.learned() == (pytest.approx(0.7), ())


def test_curves_are_interpolated() -> None:
    found = times()
    assert found.curve(found.expected(), 1 + SIZES.index(11)) == pytest.approx([1.2 + 0.05 * n for n in range(12)])
    assert found.at(found.expected(), None) == 1.0 and found.at(found.expected(), 2.5) == pytest.approx(1.325)


def test_what_takes_too_long_is_tried_in_steps_only() -> None:
    found = StepTimes(SIZES, [1.0, *(9.0 + 0.1 * n for n in SIZES)])
    assert found.affordable(2.5) == 2  # one draft token, whatever is expected
    for step in range(3):
        found.learn(1, 1.3, step)
    found.expected()
    assert found.affordable(2.5) == len(SIZES)  # all are corrected
    for step in range(3):
        found.learn(4, 9.0, step)
    found.expected()
    assert found.affordable(2.4) == 3  # two draft tokens, of which little is known
    assert found.affordable(99.0) == len(SIZES)


def test_a_slow_stretch_holds_for_the_sizes_that_ran_before_it() -> None:
    found = times()
    for step in range(20):
        found.learn(None, PRIOR[0], step)
    for step in range(20, 60):
        found.learn(4, PRIOR[FOUR] * (1 if step < 40 else 1.6), step)
    assert found.expected()[0] == pytest.approx(1.6 * PRIOR[0])
    found.learn(None, 1.6 * PRIOR[0], 60)
    assert found.expected()[0] == pytest.approx(1.6 * PRIOR[0])
    for step in range(61, 65):  # what was tried a few times tells of itself only
        found.learn(None, 0.8 * PRIOR[0], step)
    assert found.expected()[0] == pytest.approx(0.8 * PRIOR[0])
    assert found.expected()[FOUR] == pytest.approx(1.6 * PRIOR[FOUR])


def test_a_clock_that_did_not_move_does_no_harm() -> None:
    found = times()
    for step in range(20):
        found.learn(4, 0.0, step)
    found.learn(7, 1.0, 20)
    assert all(math.isfinite(each) and each > 0 for each in found.expected() + found.least(21))


def test_when_other_work_ends_all_sizes_take_their_least_times_again() -> None:
    found = times()

    def run(plain: int, drafted: int, slowdown: float, draft_slowdown: float, step: int) -> None:
        for number in range(plain):
            found.learn(None, slowdown * PRIOR[0], step + number)
        for number in range(drafted):
            found.learn(4, draft_slowdown * PRIOR[FOUR], step + plain + number)

    run(plain=20, drafted=3, slowdown=1.0, draft_slowdown=1.0, step=0)
    run(plain=20, drafted=9, slowdown=5.0, draft_slowdown=15.0, step=30)
    assert found.expected()[FOUR] == pytest.approx(15 * PRIOR[FOUR], rel=0.01)
    run(plain=3, drafted=0, slowdown=1.0, draft_slowdown=1.0, step=70)
    assert found.expected()[0] == pytest.approx(PRIOR[0]) and found.expected()[FOUR] == pytest.approx(PRIOR[FOUR])


def test_one_fast_step_shows_that_slow_ones_were_stalls() -> None:
    found = times()
    for step in range(9):
        found.learn(4, 9.0, 100 * step)
    found.learn(4, 1.0, 1000)
    assert found.expected()[FOUR] <= 1.25
