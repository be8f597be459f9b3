import torch

from blockdraft.proposal import chain, depths, tree_mask

#        0
#      1   2
#     3 4   5
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 2]])


def test_chain_has_each_token_follow_the_one_before() -> None:
    proposal = chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert proposal.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert depths(proposal.parents).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert tree_mask(proposal.parents).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2


def test_tree_mask_is_the_node_and_its_ancestors() -> None:
    def ancestors(node: int) -> set[int]:
        return {node} | (ancestors(int(PARENTS[0, node])) if node else set())

    mask = tree_mask(PARENTS)[0]
    for node in range(6):
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors(node)
    assert depths(PARENTS).tolist() == [[0, 1, 1, 2, 2, 2]]


def test_rows_may_hold_different_trees() -> None:
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0]])
    assert depths(parents).tolist() == [[0, 1, 2], [0, 1, 1]]
    assert tree_mask(parents)[1].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
