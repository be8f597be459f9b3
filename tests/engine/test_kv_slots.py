import random

import pytest

from blockdraft.engine.kv_slots import BLOCK, FreeSlots, PrefixIndex
from blockdraft.engine.prefix_store import common_length


def text(*parts: tuple[int, int]) -> list[int]:
    """Tokens from parts (token, count)."""
    return [token for token, count in parts for _ in range(count)]


def test_common_length() -> None:
    assert (
        common_length([], [1]),
        common_length([1, 2, 3], [1, 2, 4]),
        common_length([1, 2], [1, 2, 4]),
        common_length([3], [4]),
    ) == (0, 2, 2, 0)


def test_the_longest_prefix_equals_a_search_of_all_sequences() -> None:
    choose, index, texts = random.Random(1), PrefixIndex(), dict[int, list[int]]()

    def made() -> list[int]:
        """A text of few different tokens, so that beginnings often agree."""
        parts = [(choose.randint(0, 1), BLOCK // 2) for _ in range(choose.randint(0, 9))]
        return text(*parts, (2, choose.randint(0, 3)))

    actual = set()
    for _ in range(2000):
        row = choose.randint(0, 9)
        if choose.random() < 0.3:
            index.remove(row)
            texts.pop(row, None)
        else:
            texts[row] = made()
            index.add(row, texts[row])
        wanted = made()
        longest = max((common_length(held, wanted) for held in texts.values()), default=0)
        best = index.longest(wanted)
        if longest < BLOCK:
            assert best is None
        else:
            assert best is not None and best[1] == common_length(texts[best[0]], wanted) == longest
            actual.add(longest)
    assert len(actual) > 10 and max(actual) > 3 * BLOCK


def test_ties_go_to_the_sequence_that_was_indexed_first() -> None:
    index = PrefixIndex()
    for row in (5, 2, 9):
        index.add(row, text((1, 40), (row, 10)))
    assert index.longest(text((1, 60))) == (5, 40)
    index.add(5, text((1, 40), (5, 10)))
    assert index.longest(text((1, 60))) == (2, 40)


def first_fit(free: list[bool], count: int) -> int | None:
    """First of so many free slots side by side."""
    return next((at for at in range(len(free) - count + 1) if all(free[at : at + count])), None)


@pytest.mark.parametrize("seed", range(5))
def test_random_allocations_against_a_list_of_slots(seed: int) -> None:
    choose, total = random.Random(seed), 60
    slots, free, taken = FreeSlots(total), [True] * total, list[tuple[int, int]]()
    refused = 0
    for _ in range(2000):
        if taken and choose.random() < 0.5:
            first, count = taken.pop(choose.randrange(len(taken)))
            if choose.random() < 0.3:  # only its end, as when a row shrinks
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
        actual = slots.take(count)
        assert actual == first_fit(free, count)
        if actual is None:
            refused += 1
        else:
            free[actual : actual + count] = [False] * count
            taken.append((actual, count))
    assert refused > 100
    for first, count in taken:
        slots.give(first, count)
    assert slots.take(total) == 0 and slots.take(1) is None


def test_slots_at_a_given_place() -> None:
    slots = FreeSlots(10)
    assert slots.take(3, at=4) == 4
    assert slots.take(1, at=6) is slots.take(5, at=0) is slots.take(4, at=7) is None
    assert slots.would_fit(6, [(4, 3)], at=4) and not slots.would_fit(7, [(4, 3)], at=4)
    assert (slots.take(4), slots.take(3, at=7), slots.take(1)) == (0, 7, None)


def test_nothing_is_allocated_without_slots() -> None:
    assert FreeSlots(0).take(1) is None and not FreeSlots(0).would_fit(1, [])
    assert FreeSlots(0).would_fit(3, [(4, 2), (6, 1)])


@pytest.mark.parametrize(("first", "count"), [(2, 3), (0, 2), (4, 2), (1, 9)])
def test_freeing_free_slots_is_refused(first: int, count: int) -> None:
    slots = FreeSlots(10)
    slots.take(10)
    slots.give(1, 2)
    slots.give(4, 1)
    with pytest.raises(AssertionError, match="free twice"):
        slots.give(first, count)
