import random

import pytest
import torch

from blockdraft.decode.proposal import Proposal, SparseDistribution, chain, cut, depths, tree_mask
from blockdraft.types import RequestDrafting


def ancestors(parents: list[int], node: int) -> list[int]:
    """Return the node and its ancestors, as a readable twin."""
    return [node] if parents[node] < 0 else [node, *ancestors(parents, parents[node])]


def random_parents(count: int, seed: int) -> list[int]:
    """Return the parents of a random tree, with padding at its end."""
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


#   0 - 1 - 3 - 5        the row below is padded with two nodes
#     \ 2 - 4
TREE = [-1, 0, 0, 1, 2, 3]
SHORT = [-1, 0, 1, 2, -1, -1]


def tree() -> Proposal:
    tokens = torch.arange(12).view(2, 6)
    return Proposal(tokens, torch.tensor([TREE, SHORT]), expected=(1.0, 2.0))


@pytest.mark.parametrize(
    ("bound", "kept", "parents"),
    [
        (RequestDrafting(enabled=False), [0], [-1]),
        (RequestDrafting(block_size=1), [0], [-1]),
        (RequestDrafting(block_size=2), [0, 1, 2], [-1, 0, 0]),
        (RequestDrafting(block_size=3), [0, 1, 2, 3, 4], [-1, 0, 0, 1, 2]),
        (RequestDrafting(tree_budget=2), [0, 1, 2], [-1, 0, 0]),
        (RequestDrafting(tree_budget=4), [0, 1, 2, 3, 4], [-1, 0, 0, 1, 2]),
        (RequestDrafting(tree_budget=0), [0, 1, 3, 5], [-1, 0, 1, 2]),
        (RequestDrafting(block_size=3, tree_budget=0), [0, 1, 3], [-1, 0, 1]),
        (RequestDrafting(block_size=3, tree_budget=3), [0, 1, 2, 3], [-1, 0, 0, 1]),
        (None, [0, 1, 2, 3, 4, 5], TREE),
    ],
)
def test_one_row_is_cut_and_the_other_stays(bound: RequestDrafting | None, kept: list[int], parents: list[int]) -> None:
    actual = cut(tree(), [bound, None])
    count = max(len(kept), 4)
    assert actual.tokens[0, : len(kept)].tolist() == kept
    assert actual.parent_lists[0] == [*parents, *[-1] * (count - len(kept))]
    assert actual.tokens[1, :4].tolist() == [6, 7, 8, 9]
    assert actual.parent_lists[1] == [-1, 0, 1, 2] + [-1] * (count - 4)
    assert actual.expected == (1.0, 2.0)


def test_sampled_chains_keep_the_distributions_of_what_stays() -> None:
    dists = tuple(SparseDistribution(torch.arange(4).expand(4, 4), torch.rand(4, 4)) for _ in range(2))
    tokens = torch.arange(12).view(3, 4)
    sampled = Proposal(tokens, chain(tokens).parents, (*dists, None))
    actual = cut(
        sampled, [RequestDrafting(block_size=3), RequestDrafting(enabled=False), RequestDrafting(block_size=2)]
    )
    assert actual.parent_lists == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]
    assert actual.q is not None and actual.q[1:] == (None, None)  # without draft tokens there is no distribution
    assert actual.q[0] is not None and torch.equal(actual.q[0].probs, dists[0].probs[:3])
    none = cut(sampled, [RequestDrafting(enabled=False)] * 3)
    assert none.q is None and none.tokens.tolist() == [[0], [4], [8]]


def test_chosen_draft_tokens_beside_a_sampled_chain_get_none_of_its_distributions() -> None:
    dist = SparseDistribution(
        torch.arange(4).expand(3, 4), torch.rand(3, 4)
    )  # of the anchor and two sampled draft tokens
    beside = Proposal(torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 1, 0, 3]]), (dist,))
    actual = cut(beside, [RequestDrafting(block_size=2)])
    assert (actual.tokens.tolist(), actual.parent_lists) == ([[0, 1, 3]], [[-1, 0, 0]])
    assert actual.q is not None and actual.q[0] is not None and torch.equal(actual.q[0].probs, dist.probs[:2])
