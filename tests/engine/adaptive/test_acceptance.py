import pytest

from blockdraft.engine.adaptive.acceptance import Yields
from blockdraft.engine.adaptive.cycle_times import Times
from blockdraft.engine.request import Request
from blockdraft.types import SamplingParams

TIMES = Times([0, 1, 2, 3], [1.0] * 5, 0.1)


def request() -> Request:
    return Request(prompt=[1], params=SamplingParams(9))


def fed(accepted: int, expected: float | None = None, cycles: int = 300, knows: bool = False) -> tuple[Yields, Request]:
    """What is known after cycles of a request of which so many of three guesses were accepted."""
    found, row = Yields(4, 3, knows), request()
    for now in range(cycles):
        found.age(1)
        found.learn(TIMES, [row], 3, [3], [accepted], None if expected is None else [expected], now, usual=True)
    return found, row


def test_chains_yield_as_many_tokens_as_were_accepted_at_each_position() -> None:
    assert Yields(4, 3, False).chains() == pytest.approx([1, 1.6, 1.96, 2.176, 2.3056])
    found, _ = fed(2)
    one, two, three = (more - less for less, more in zip(found.chains()[:3], found.chains()[1:4], strict=True))
    assert one > two > 0.85 > 0.15 > three


def test_trust_is_the_share_of_what_was_expected() -> None:
    assert fed(2, 4.0)[0].trust == pytest.approx(0.5, rel=0.05)
    assert fed(3, 2.0)[0].trust == pytest.approx(1.5, rel=0.05)
    assert fed(0, 1e-4, cycles=3000)[0].trust > 0.9  # cycles of which nothing is expected say nothing


def test_what_a_drafter_expects_that_computed_nonsense_is_forgotten() -> None:
    found, row = fed(1, expected=2.0, knows=True)
    trust = found.trust
    for number in (float("nan"), float("inf")):
        for usual in (True, False):
            told = found.learn(TIMES, [row], 3, [3], [1], [number], 300, usual=usual)
            assert 0 < told < 4
    assert found.trust == trust


def test_what_is_known_of_a_request_is_told_apart_from_what_is_known_of_all() -> None:
    found, good = fed(3)
    bad = request()
    assert found.of(bad, 300).mean == pytest.approx(1, abs=0.2)  # as all were so far
    for now in range(300, 400):
        found.learn(TIMES, [bad], 3, [3], [0], None, now, usual=True)
    assert found.of(bad, 400).mean < 0.6 < 0.9 < found.of(good, 400).mean
    assert found.of(good, 4000).variance > found.of(good, 400).variance


def test_after_many_cycles_one_more_says_little_until_time_has_passed() -> None:
    found, _ = fed(2)
    assert not Yields(4, 3, False).sure and found.sure
    found.age(1000)
    assert not found.sure


def test_a_trial_does_not_change_what_is_usual() -> None:
    found, row = fed(3, 3.0, knows=True)
    before = dict(found.usual), found.of(row, 300), found.depth
    assert found.learn(TIMES, [row], 1, [1], [0], [2.0], 300, usual=False) == pytest.approx(1 + 2.0 * found.trust)
    assert (found.usual, found.of(row, 300), found.depth) == before
