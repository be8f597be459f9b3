"""The KV cache against plain lists, with sequences side by side and at any KV slots; and the masks of attention."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import depths, tree_mask
from blockdraft.nn.attention import additive_mask, visible_slots
from blockdraft.nn.cache import KVCache, StoreShape

SHAPES = [StoreShape(2, 3, 4, torch.float32)]
PLACES = {"side by side": ((0, 10), (10, 10)), "anywhere": ((22, 10), (3, 15)), "one at the end": ((9, 10), (30, 10))}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def cache(request: pytest.FixtureRequest, scatter: Callable[..., Any]) -> KVCache:
    """Return a cache of two sequences, with KV slots of others around them."""
    made: KVCache = scatter(KVCache(1, 40), *request.param)
    return made


def node_states(tokens: Tensor) -> Tensor:
    """Return states `[B, 1, N, 2]` that identify their token."""
    return tokens[:, None, :, None].float().expand(-1, 1, -1, 2).contiguous()


def write(cache: KVCache, *tokens: list[int]) -> list[Tensor]:
    """Write these nodes, and return the keys and values that attention sees."""
    states = node_states(torch.tensor(tokens))
    return cache.write(0, states, states + 1000)


def contents(cache: KVCache) -> list[list[int]]:
    """Return the tokens of the sequences, read by writing a node that is not committed."""
    keys, values = write(cache, *[[99]] * len(cache.starts))
    actual = []
    for place, length in enumerate(cache.lengths):
        held = keys[place, 0, : length + 1]
        assert torch.equal(values[place, 0, : length + 1], held + 1000)
        actual.append(held[:, 0].int().tolist())
    assert all(row.pop() == 99 for row in actual)
    return actual


def fill(cache: KVCache, *rows: list[int]) -> KVCache:
    """Commit these tokens, one list a row."""
    longest = max(map(len, rows))
    write(cache, *[row + [77] * (longest - len(row)) for row in rows])
    cache.commit([range(len(row)) for row in rows])
    return cache


@pytest.mark.parametrize("lengths", [[3, 2], [2, -1], [2]])
def test_truncating_to_more_tokens_than_there_are_is_refused(cache: KVCache, lengths: list[int]) -> None:
    fill(cache, [1, 2], [4, 5])
    with pytest.raises((AssertionError, ValueError)):
        cache.truncate(lengths)


# Sequences at KV slots.


def test_random_changes_to_sequences_leave_the_others_alone() -> None:
    """Many random operations, on slots that were used before, against lists."""
    choose = random.Random(3)
    cache, held, capacities = KVCache(1, 60), dict[int, list[int]](), dict[int, int]()
    cache.close(0)
    memory, number, seen = None, 0, set()
    for _ in range(1500):
        free = [at for at in range(60) if not any(row <= at < row + size for row, size in capacities.items())]
        what = choose.choice(["open", "close", "copy", "shrink", "truncate", "zero_slots", *["commit"] * 4])
        row = choose.choice([*held, -1])
        if what == "open" and free:
            row = choose.choice(free)
            size = choose.randint(0, next((n for n in range(60) if row + n not in free), 60))
            if size:
                cache.open(row, size)
                held[row], capacities[row] = [], size
        elif row < 0:
            continue
        elif what == "close":
            cache.close(row)
            del held[row], capacities[row]
        elif what == "copy":
            into = [other for other in held if not held[other] and other != row]
            length = choose.randint(0, len(held[row]))
            if not into or length > capacities[into[0]]:
                continue
            cache.copy(row, into[0], length)
            held[into[0]] = held[row][:length]
        elif what == "shrink":
            size = choose.randint(1, capacities[row])
            cache.shrink(row, size)
            held[row], capacities[row] = held[row][:size], size
        elif what == "truncate":
            length = choose.randint(0, len(held[row]))
            cache.of([row]).truncate([length])
            held[row] = held[row][:length]
        elif what == "zero_slots":
            cache.zero_slots(row)
        else:
            rows = choose.sample(sorted(held), choose.randint(1, len(held)))
            count = min(3, *(capacities[r] - len(held[r]) for r in rows))
            if count < 1:
                continue
            tokens = [[number + 10 * place + node for node in range(count)] for place in range(len(rows))]
            paths = [sorted(choose.sample(range(count), choose.randint(0, count))) for _ in rows]
            part = cache.of(rows)
            write(part, *tokens)
            part.commit(paths)
            for r, row_tokens, path in zip(rows, tokens, paths, strict=True):
                held[r] += [row_tokens[node] for node in path]
            number = (number + 50) % 997
            memory = memory or [store.data_ptr() for store in cache.stores]
        seen.add(what)
        roomy = [r for r in held if len(held[r]) < capacities[r]]
        if roomy and memory:
            assert contents(cache.of(roomy)) == [held[r] for r in roomy]
        assert all(cache.of([r]).lengths == [len(held[r])] for r in held)
        assert memory in (None, [store.data_ptr() for store in cache.stores])  # allocated once
    assert len(seen) == 7


def test_a_copy_has_to_fit(cache: KVCache) -> None:
    first, second = cache.starts
    fill(cache, [1, 2, 3], [])
    cache.shrink(second, 2)
    with pytest.raises(AssertionError):
        cache.shrink(second, 3)
    with pytest.raises(AssertionError):
        cache.copy(first, second, 3)  # more than it can hold
    cache.copy(first, second, 2)
    with pytest.raises(AssertionError):
        cache.copy(first, second, 1)  # it is not empty


def test_sequences_outside_of_the_memory_are_refused() -> None:
    cache = KVCache(1, 10)
    cache.close(0)
    for row, capacity in ((-1, 3), (8, 3), (0, 11)):
        with pytest.raises(AssertionError, match="slots of 10"):
            cache.open(row, capacity)


def test_zeroing_leaves_committed_tokens_unless_whole(cache: KVCache) -> None:
    first, second = cache.starts
    before = fill(cache, [1, 2], [3, 4]).lengths
    write(cache, [5, 6, 7], [8, 9, 10])
    cache.zero_slots(first)
    states = [store[0, :, 0].clone() for store in cache.stores]
    assert all(not state[first + 2 : first + 10].any() for state in states)
    assert all(state[second + 2 : second + 5].all() for state in states)
    assert (cache.lengths, contents(cache)) == (before, [[1, 2], [3, 4]])
    cache.zero_slots(second, whole=True)
    for store in cache.stores:
        assert not store[:, second : second + 10].any() and store[:, first : first + 2].all()


def test_an_empty_cache_has_no_slots() -> None:
    cache = KVCache(1, 0)
    assert cache.lengths == [0] and cache.capacity == 0
    with pytest.raises(AssertionError, match="1 slots needed, 0 allocated"):
        write(cache, [5])


def test_stored_tokens_are_loaded(cache: KVCache) -> None:
    first, second = cache.starts
    fill(cache, [1, 2, 3], [])
    tensors = cache.export(first, 2)
    assert {tensor.size(-2) for tensor in tensors.values()} == {2}
    for into, start in ((cache, second), (KVCache(1, 10), 0)):
        into.load(start, [1, 2], tensors)
        assert contents(into.of([start])) == [[1, 2]]


def test_what_is_stored_of_the_last_token(cache: KVCache) -> None:
    fill(cache, [1, 2, 3], [])
    assert cache.last(cache.stores[0]).tolist() == [[[3.0, 3.0]], [[0.0, 0.0]]]


# Views.


def numbered(cache: KVCache) -> Tensor:
    """All slots, `[layers, heads, slots, D]`, each with its number in all layers and heads, and these besides."""
    [memory] = cache.stores
    layers, heads = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    memory.copy_(torch.arange(memory.size(2))[:, None] + 100 * layers + 1000 * heads + torch.arange(4) / 8)
    return memory


@pytest.mark.parametrize(
    ("places", "is_memory"),
    [
        (((5, 9),), True),
        (((5, 9), (20, 9)), True),
        (((5, 9), (14, 12), (23, 9)), True),
        (((20, 9), (5, 9)), False),
        (((5, 9), (14, 9), (24, 9)), False),
    ],
)
@pytest.mark.parametrize("one_layer", [False, True])
def test_a_view_shows_the_slots_of_each_sequence(
    scatter: Callable[..., Any], places: tuple[tuple[int, int], ...], is_memory: bool, one_layer: bool
) -> None:
    cache = scatter(KVCache(1, 40, SHAPES), *places)
    memory = numbered(cache)
    cache.commit([range(3 + place) for place in range(len(places))])
    whole = memory[1] if one_layer else memory
    view, own = cache.view(whole, 3)
    end = 5 + len(places)
    assert own == is_memory and view.shape == (*whole.shape[:-3], len(places), 3, end, 4)
    for place, (row, _) in enumerate(places):
        nodes = slice(0, 6 + place)
        assert torch.equal(view.select(-4, place)[..., nodes, :], whole[..., row : row + 6 + place, :])
    assert own == (view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr())


@pytest.mark.parametrize("end", [None, 9, 20])
@pytest.mark.parametrize("places", [((5, 9), (20, 12)), ((20, 12), (5, 9)), ((5, 9), (14, 9), (24, 9)), ((5, 9),)])
def test_no_view_shows_slots_of_another_sequence(
    scatter: Callable[..., Any], places: tuple[tuple[int, int], ...], end: int | None
) -> None:
    cache = scatter(KVCache(1, 40, SHAPES), *places)
    memory = numbered(cache)
    cache.commit([range(4 * place) for place in range(len(places))])
    foreign = torch.ones(40, dtype=torch.bool)
    for row, capacity in places:
        foreign[row : row + capacity] = False
    memory[:, :, foreign] = torch.nan
    assert cache.view(memory, 1, end)[0].isfinite().all()
    for place, (row, capacity) in enumerate(places):  # nor does a row show another one that the batch has
        others = memory.clone()
        others[:, :, [at for at in range(40) if not row <= at < row + capacity]] = torch.nan
        assert cache.view(others, 1, end)[0][:, place].isfinite().all()


def test_nodes_that_are_put_are_all_that_changes(scatter: Callable[..., Any]) -> None:
    cache = scatter(KVCache(1, 40, SHAPES), (20, 12), (5, 9), (33, 7))
    memory = numbered(cache)
    cache.commit([range(4), range(6), []])
    copied, _ = cache.view(memory, 3)
    expected = memory.clone()
    for place, (row, length) in enumerate(zip(cache.starts, cache.lengths, strict=True)):
        copied[:, place] = -copied[:, place] - 1
        expected[:, :, row + length : row + length + 3] = copied[:, place, :, length : length + 3]
    cache.put(memory, copied, 3)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("count", [5, 8])
def test_nodes_past_the_slots_of_a_sequence_are_refused(cache: KVCache, count: int) -> None:
    """Even if KV slots of others follow."""
    cache.shrink(cache.starts[1], 6)
    fill(cache, [1, 2, 3], [4, 5])
    memory = torch.zeros(2, 3, 40, 4)
    states = node_states(torch.zeros(2, count, dtype=torch.long))
    for use in (cache.check_room, lambda n: cache.write(0, states, states), lambda n: cache.view(memory, n)):
        with pytest.raises(AssertionError, match=f"{2 + count} slots needed, 6 allocated|slots needed, 10 allocated"):
            use(count)
    assert cache.check_room(4) == 7


# All layers in one tensor.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_zero_at_first_and_has_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    cache = KVCache(2, 9, [StoreShape(2, 3, 4, dtype), StoreShape(1, 1, 5, torch.float64)])
    assert cache.nbytes == 0
    memory, other = cache.stores
    assert memory.shape == (2, 3, 18, 4) and memory.dtype == dtype and not memory.any()
    assert other.shape == (1, 1, 18, 5) and cache.nbytes == memory.nbytes + other.nbytes
    assert cache.nbytes == 18 * sum(shape.token_bytes for shape in cache.shapes)


# Masks.


@pytest.mark.parametrize("window", [None, 1, 3])
def test_visible_slots_against_an_element_wise_twin(window: int | None) -> None:
    lengths = [4, 1]
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    within = tree_mask(parents)
    positions = torch.tensor(lengths)[:, None] + depths(parents)
    visible = visible_slots(lengths, within, positions, window)
    for row, length in enumerate(lengths):
        for node in range(4):
            for slot in range(max(lengths) + 4):
                if slot < length:
                    allowed, position = True, slot
                elif slot < length + 4:
                    allowed = bool(within[row, node, slot - length])
                    position = int(positions[row, slot - length])
                else:
                    allowed, position = False, slot
                if window is not None:
                    allowed = allowed and abs(int(positions[row, node]) - position) < window
                assert bool(visible[row, node, slot]) == allowed


def test_additive_mask_hides_with_the_lowest_number() -> None:
    mask = additive_mask(torch.tensor([[[True, False]]]), torch.bfloat16)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.flatten().tolist() == [0.0, torch.finfo(torch.bfloat16).min]
