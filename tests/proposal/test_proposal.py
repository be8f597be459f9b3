import random

import pytest
import torch

from blockdraft.proposal import chain, depths, tree_mask


def ancestors(parents: list[int], node: int) -> list[int]:
    """The readable twin: the node and all above it."""
    return [node] if parents[node] < 0 else [node, *ancestors(parents, parents[node])]


def random_parents(count: int, seed: int) -> list[int]:
    """A tree in random order, with nodes at its end that fill up the row."""
    generator = random.Random(seed)
    nodes = generator.randint(1, count)
    return [-1, *(generator.randrange(max(0, i - 6), i) for i in range(1, nodes)), *[-1] * (count - nodes)]


def test_chain_has_each_token_follow_the_one_before() -> None:
    proposal = chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert proposal.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert depths(proposal.parents).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert tree_mask(proposal.parents).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40])
def test_mask_and_depths_are_those_of_the_ancestors(count: int) -> None:
    rows = [random_parents(count, seed) for seed in range(4)] + [list(range(-1, count - 1))]
    mask, depth = tree_mask(torch.tensor(rows)), depths(torch.tensor(rows))
    assert mask.dtype == torch.bool and depth.dtype == torch.int64
    for row, parents in enumerate(rows):
        for node in range(count):
            above = ancestors(parents, node)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(above)
            assert depth[row, node] == len(above) - 1
