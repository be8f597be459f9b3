import pytest

from blockdraft.engine.trials import AGAIN, BETWEEN, CREDIT, EXPLORE, MOST_LOST, NEW, PATIENCE, Trials


def begun(plain: float = 1.0) -> Trials:
    found = Trials()
    found.begin(plain)
    found.planned = NEW
    return found


def test_new_sizes_are_tried_on_credit_and_then_once_the_loss_is_made_up_for() -> None:
    found, now, trials = begun(), 0, 0
    while found.new_is_due(now):
        found.charge(cost=2.0, value=0.0, plain=1.0, wasted=False, now=now)
        trials, now = trials + 1, now + BETWEEN
    assert trials == CREDIT / 2 + 1  # the last one is begun with nothing lost yet
    assert found.cycles_until_new(now, 1.0) == pytest.approx(2.0 / EXPLORE)
    found.planned = None
    found.make_up(2.0 / EXPLORE)
    assert found.new_is_due(now)


def test_between_two_trials_there_are_other_cycles() -> None:
    found = begun()
    found.charge(cost=1.0, value=1.0, plain=1.0, wasted=False, now=7)
    assert not found.new_is_due(7 + BETWEEN - 1) and found.new_is_due(7 + BETWEEN)
    found.put_off(20)
    assert not found.new_is_due(20 + PATIENCE - 1) and found.cycles_until_new(20, 1.0) == PATIENCE


def test_a_kind_of_trial_makes_up_for_the_other_and_not_for_itself() -> None:
    found = begun()
    found.planned = AGAIN
    assert found.again_is_due()
    found.charge(cost=1.0, value=0.0, plain=1.0, wasted=False, now=0)
    found.make_up(1e6)
    assert not found.again_is_due()
    found.planned = NEW
    found.make_up(1 / EXPLORE)
    assert found.again_is_due()


@pytest.mark.parametrize(("value", "wasted", "lost"), [(0.25, False, 0.75), (5.0, False, 0.01), (5.0, True, 0.1)])
def test_a_trial_loses_what_its_tokens_are_not_worth_and_something_in_any_case(
    value: float, wasted: bool, lost: float
) -> None:
    found = Trials()
    found.planned = AGAIN
    found.charge(cost=1.0, value=value, plain=1.0, wasted=wasted, now=0)
    found.planned = None
    found.make_up(0.99 * lost / EXPLORE)
    assert not found.again_is_due()
    found.make_up(0.02 * lost / EXPLORE)
    assert found.again_is_due()


def test_one_trial_that_took_for_ever_does_not_forbid_the_next_for_ever() -> None:
    found = Trials()
    found.planned = NEW
    found.charge(cost=1e9, value=0.0, plain=1.0, wasted=False, now=0)
    assert found.cycles_until_new(0, 1.0) == pytest.approx(MOST_LOST / EXPLORE)
