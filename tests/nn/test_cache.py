import pytest
import torch
from torch import Tensor

from blockdraft.nn.attention import additive_mask, visible_slots
from blockdraft.nn.cache import KVCache, write_nodes
from blockdraft.proposal import chain, depths, tree_mask


def node_states(tokens: Tensor) -> Tensor:
    """A state `[B, 1, N, 2]` that tells which token it belongs to."""
    return tokens[:, None, :, None].float().expand(-1, 1, -1, 2).contiguous()


def test_commit_keeps_the_path_and_forgets_the_rest() -> None:
    cache = KVCache(batch=2, capacity=10)
    cache.write(0, *[node_states(torch.tensor([[1, 2, 3], [11, 12, 13]]))] * 2)
    cache.commit([[0, 1, 2], [0]])
    assert cache.lengths == [3, 1]
    nodes = torch.tensor([[4, 5, 6, 7], [14, 15, 16, 17]])
    keys, _ = cache.write(0, *[node_states(nodes)] * 2)
    assert keys.shape == (2, 1, 7, 2)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert keys[1, 0, :5, 0].tolist() == [11, 14, 15, 16, 17]
    cache.commit([[0, 2], [0, 1, 3]])
    keys, values = cache.write(0, *[node_states(torch.tensor([[8], [18]]))] * 2)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 6, 8]
    assert values[1, 0, :5, 0].tolist() == [11, 14, 15, 17, 18]


def test_an_empty_path_commits_nothing() -> None:
    cache = KVCache(1, 4)
    cache.write(0, *[node_states(torch.tensor([[1, 2]]))] * 2)
    cache.commit([[]])
    assert cache.lengths == [0]


def test_select_keeps_rows() -> None:
    cache = KVCache(3, 4)
    cache.write(0, *[node_states(torch.tensor([[1], [2], [3]]))] * 2)
    cache.commit([[0], [0], []])
    cache.select([1])
    keys, _ = cache.write(0, *[node_states(torch.tensor([[9]]))] * 2)
    assert (cache.lengths, keys[0, 0, :, 0].tolist()) == ([1], [2, 9])


def test_writing_past_the_capacity_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="5 slots needed, 4 allocated"):
        KVCache(1, 4).write(0, *[node_states(torch.zeros(1, 5, dtype=torch.long))] * 2)


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


def test_chain_sees_all_before_it() -> None:
    within = tree_mask(chain(torch.tensor([[1, 2, 3]])).parents)
    assert visible_slots([2], within)[0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def filled(*rows: list[int], capacity: int = 6) -> KVCache:
    """A cache whose row i holds the states of `rows[i]`."""
    cache = KVCache(len(rows), capacity)
    longest = max(map(len, rows))
    cache.write(0, *[node_states(torch.tensor([row + [0] * (longest - len(row)) for row in rows]))] * 2)
    cache.commit([range(len(row)) for row in rows])
    return cache


def contents(cache: KVCache) -> list[list[int]]:
    """What the rows hold, read by writing a node that is not committed."""
    keys, values = cache.write(0, *[node_states(torch.full((len(cache.lengths), 1), 99))] * 2)
    assert torch.equal(keys, values)
    assert [keys[row, 0, n, 0] for row, n in enumerate(cache.lengths)] == [99] * len(cache.lengths)
    return [keys[row, 0, :n, 0].int().tolist() for row, n in enumerate(cache.lengths)]


@pytest.mark.parametrize("rows", [[0, 3, 2], [3, 1], [2, 0], [1, 2, 3], [3, 2, 1, 0], []])
def test_select_moves_rows(rows: list[int]) -> None:
    before = [[1], [2, 3], [4, 5, 6], [7, 8]]
    cache = filled(*before)
    cache.select(rows)
    assert cache.lengths == [len(before[row]) for row in rows]
    if rows:
        assert contents(cache) == [before[row] for row in rows]


@pytest.mark.parametrize("capacity", [4, 9])
def test_join_takes_over_rows(capacity: int) -> None:
    cache = filled([1, 2], [3], capacity=4)
    cache.join(filled([4, 5, 6], [7]), capacity)
    assert cache.capacity == capacity
    assert contents(cache) == [[1, 2], [3], [4, 5, 6], [7]]


def test_join_reuses_the_memory_of_rows_that_left() -> None:
    cache = filled([1], [2], [3])
    store = cache._layers[0][0]
    cache.select([2])
    cache.join(filled([4], [5]), 6)
    assert contents(cache) == [[3], [4], [5]]
    assert cache._layers[0][0] is store
    cache.select([0])
    cache.join(filled([6], capacity=20), 20)
    assert cache._layers[0][0].shape[::2] == (2, 20)  # exactly what is needed now, not the three rows of before


def test_rows_join_a_cache_that_never_held_any() -> None:
    cache = KVCache(0, 9)
    cache.join(KVCache(1, 0), 9)
    cache.join(filled([4, 5]), 9)
    assert cache.lengths == [0, 2]
    assert contents(cache) == [[], [4, 5]]


def test_prefix_is_a_copy_of_the_beginning() -> None:
    cache = filled([1, 2, 3], [4, 5])
    prefix = cache.prefix(0, 2)
    cache.select([1])
    cache.join(filled([9, 9, 9]), 6)
    whole = KVCache(0, 5)
    whole.join(prefix, 5)
    assert contents(whole) == [[1, 2]]


def test_truncate_keeps_the_beginning_of_each_row() -> None:
    cache = filled([1, 2, 3], [4, 5], [6])
    cache.truncate([1, 2, 0])
    assert contents(cache) == [[1], [4, 5], []]
    cache.write(0, *[node_states(torch.tensor([[7], [8], [9]]))] * 2)
    cache.commit([[0]] * 3)
    assert contents(cache) == [[1, 7], [4, 5, 8], [9]]


@pytest.mark.parametrize("lengths", [[3, 2], [2, -1], [2]])
def test_truncating_to_more_than_there_is_is_our_bug(lengths: list[int]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        filled([1, 2], [4, 5]).truncate(lengths)


# All layers in one tensor.


def write_stacked(cache: KVCache, tokens: Tensor) -> Tensor:
    """Write states that tell layer, head and token, and return the store."""
    store = cache.stacked(2, 3, 1, torch.zeros(1))
    layers, heads = torch.arange(2)[:, None, None, None], torch.arange(3)
    nodes = (100.0 * layers + 1000.0 * heads + tokens[None, :, :, None]).unsqueeze(-1)
    slots = cache.slots(tokens.size(1), torch.device("cpu"))
    for layer in range(2):
        write_nodes(store[layer], nodes[layer], slots if len(set(cache.lengths)) > 1 else slots[0])
    return store


def stacked_contents(cache: KVCache) -> list[list[int]]:
    store = cache.stacked(2, 3, 1, torch.zeros(1))
    assert store.shape == (2, len(cache.lengths), 3, cache.capacity, 1)
    layers, heads = torch.arange(2)[:, None, None, None, None], torch.arange(3)[:, None, None]
    tokens = store - 100 * layers - 1000 * heads
    rows = [tokens[:, row, :, :length] for row, length in enumerate(cache.lengths)]
    assert all(torch.equal(row, row[:1, :1].expand_as(row)) for row in rows)  # each layer and head holds the same
    return [row[0, 0, :, 0].int().tolist() for row in rows]


def test_stacked_layers_are_committed_moved_joined_and_copied_together() -> None:
    cache = KVCache(2, 8)
    write_stacked(cache, torch.tensor([[1, 2, 3], [11, 12, 13]]))
    cache.commit([[0, 2], [0, 1, 2]])
    assert stacked_contents(cache) == [[1, 3], [11, 12, 13]]
    write_stacked(cache, torch.tensor([[4, 5, 6], [14, 15, 16]]))
    cache.commit([[0, 1, 2], [0, 2]])
    assert stacked_contents(cache) == [[1, 3, 4, 5, 6], [11, 12, 13, 14, 16]]
    prefix = cache.prefix(1, 2)
    cache.truncate([2, 4])
    cache.select([1, 0])
    cache.join(prefix, 9)
    assert stacked_contents(cache) == [[11, 12, 13, 14], [1, 3], [11, 12]]
    cache.select([2, 1])
    assert stacked_contents(cache) == [[11, 12], [1, 3]]
    joined = KVCache(0, 5)
    joined.join(cache, 5)
    assert stacked_contents(joined) == [[11, 12], [1, 3]]
