import pytest

from blockdraft.engine.adaptive.acceptance import Acceptance
from blockdraft.engine.request import Request
from blockdraft.types import SamplingParams


def request() -> Request:
    return Request(prompt=[1], params=SamplingParams(9))


def fed(accepted: int, cycles: int = 300) -> tuple[Acceptance, Request]:
    """What is known after cycles of a request of which so many of three guesses were accepted."""
    found, row = Acceptance(4), request()
    for _ in range(cycles):
        found.age()
        found.learn_paths([row], [3], [accepted])
    return found, row


def test_chains_yield_as_many_tokens_as_were_accepted_at_each_position() -> None:
    assert Acceptance(3).chains() == pytest.approx([1, 1.6, 1.96, 2.176])
    found = fed(2)[0].chains()
    one, two, three = (more - less for less, more in zip(found[:3], found[1:4], strict=True))
    assert one > two > 0.8 > 0.2 > three


def test_what_was_never_reached_borrows_from_the_others() -> None:
    assert fed(3)[0].chains()[4] > 4.6
    assert fed(0)[0].chains()[4] < 1.1


def test_a_few_new_guesses_say_much_after_a_long_pause() -> None:
    found, row = fed(0)
    for _ in range(1000):
        found.age()
    before = found.chains()[3]
    found.learn_paths([row], [3], [3])
    assert before < 1.1 and 1.3 < found.chains()[3] < 3


def test_hopes_are_above_what_is_expected_and_rise_as_evidence_fades() -> None:
    found, _ = fed(1, cycles=60)
    upper_bound, expected = found.upper_bounds(), found.chains()
    assert all(more > less + 0.05 for more, less in zip(upper_bound[1:], expected[1:], strict=True))
    for _ in range(100):
        found.age()
    assert found.upper_bounds()[1] - found.chains()[1] > 1.5 * (upper_bound[1] - expected[1])


def test_trust_is_the_share_of_what_was_expected() -> None:
    for expected, length, calibration in ((4.0, 2, 0.5), (2.0, 3, 1.5)):
        found = Acceptance(4)
        for _ in range(300):
            tokens = found.learn_expected(expected, length)
        assert found.calibration == pytest.approx(calibration, rel=0.05) and tokens == pytest.approx(
            1 + length, rel=0.05
        )
    found = Acceptance(4)
    for _ in range(3000):  # cycles of which nothing is expected say nothing
        found.learn_expected(1e-4, 0)
    assert found.calibration > 0.9


def test_what_a_drafter_expects_that_computed_nonsense_is_forgotten() -> None:
    found = Acceptance(4)
    for number in (float("nan"), float("inf"), None):
        assert found.learn_expected(number, 2) == 3.0
    assert found.calibration == 1.0


def test_what_is_known_of_a_request_is_told_apart_from_what_is_known_of_all() -> None:
    found, good = fed(3)
    bad = request()
    assert found.share(bad) == 1.0
    for _ in range(100):
        found.age()
        found.learn_paths([good, bad], [3, 3], [3, 0])
    assert found.share(bad) < 0.7 < 1.2 < found.share(good)


def test_means_follow_what_drafters_choose() -> None:
    found, row = Acceptance(15), request()
    found.learn_usual({row: 3.0}, 6, 4)
    assert (found.tokens, found.draft_tokens) == (3.0, 6.0)
    for _ in range(100):
        found.learn_usual({row: 2.0}, 8, 4)
    assert [found.tokens, found.draft_tokens, found.depth] == pytest.approx([2.0, 8.0, 4.0], abs=0.01)
    found.learn_usual({row: 2.0}, 8, 12)
    assert found.depth == pytest.approx(8.0, abs=0.01)  # it rises fast
