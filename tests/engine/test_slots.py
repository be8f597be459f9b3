import random

import pytest

from blockdraft.engine.slots import Slots


def first_fit(free: list[bool], count: int) -> int | None:
    """The first slot from which on so many are free."""
    return next((at for at in range(len(free) - count + 1) if all(free[at : at + count])), None)


@pytest.mark.parametrize("seed", range(5))
def test_random_takes_and_gives_against_a_list_of_slots(seed: int) -> None:
    choose, total = random.Random(seed), 60
    slots, free, taken = Slots(total), [True] * total, list[tuple[int, int]]()
    refused = 0
    for _ in range(2000):
        if taken and choose.random() < 0.5:
            first, count = taken.pop(choose.randrange(len(taken)))
            if choose.random() < 0.3:  # only the end of it, as a row does that shrinks
                kept = choose.randint(0, count)
                taken += [(first, kept)] if kept else []
                first, count = first + kept, count - kept
            slots.give(first, count)
            free[first : first + count] = [True] * count
        count = choose.randint(1, 20)
        given = choose.sample(taken, choose.randint(0, len(taken)))
        were = list(free)
        for at, held in given:
            were[at : at + held] = [True] * held
        assert slots.would_fit(count, given) == (first_fit(were, count) is not None)
        found = slots.take(count)
        assert found == first_fit(free, count)
        if found is None:
            refused += 1
        else:
            free[found : found + count] = [False] * count
            taken.append((found, count))
    assert refused > 100
    for first, count in taken:
        slots.give(first, count)
    assert slots.take(total) == 0 and slots.take(1) is None


def test_without_slots_nothing_is_handed_out() -> None:
    assert Slots(0).take(1) is None and not Slots(0).would_fit(1, [])
    assert Slots(0).would_fit(3, [(4, 2), (6, 1)])


@pytest.mark.parametrize(("first", "count"), [(2, 3), (0, 2), (4, 2), (1, 9)])
def test_slots_that_are_free_already_are_not_given(first: int, count: int) -> None:
    slots = Slots(10)
    slots.take(10)
    slots.give(1, 2)
    slots.give(4, 1)
    with pytest.raises(AssertionError, match="free twice"):
        slots.give(first, count)
