"""Merging the trees of several drafters into one: its draft tokens and their probabilities."""

from dataclasses import replace

import pytest
import torch
from two_trees import LOOKUP, MODEL, plan, proposal

from blockdraft.decode.merging import merged


def test_equal_draft_tokens_are_one_node_and_the_likeliest_are_taken() -> None:
    """Node 5 gets the model's higher probability; those of lookup behind it, given the node, stay the same."""
    actual = merged(torch.tensor([3]), [proposal(LOOKUP), proposal(MODEL)], plan(7, step_seconds=[1.0] * 8))
    assert actual.tokens.tolist() == [[3, 5, 6, 7, 8, 9, 6]]
    assert actual.parents.tolist() == [[-1, 0, 1, 2, 0, 1, 4]]
    acceptance_probs = [0.6, 0.6 * 0.8, 0.6 * 0.8 * 0.9, 0.3, 0.3, 0.15]
    assert actual.expected == pytest.approx((sum(acceptance_probs),))
    other = merged(torch.tensor([3]), [proposal(MODEL), proposal(LOOKUP)], plan(7, step_seconds=[1.0] * 8))
    assert other.expected == pytest.approx(actual.expected)
    for budget in range(1, 7):
        fewer = merged(torch.tensor([3]), [proposal(LOOKUP), proposal(MODEL)], plan(budget))
        assert fewer.tokens.tolist() == [actual.tokens[0, : 1 + budget].tolist()] and fewer.expected is None
        assert fewer.parents.tolist() == [actual.parents[0, : 1 + budget].tolist()]


def test_draft_tokens_without_acceptance_probs_are_accepted_half_of_the_time() -> None:
    unknown = replace(proposal([(5, 0, 1), (8, 0, 1), (9, 1, 1)], [(5, 0, 1)]), acceptance_probs=None)
    lookup = proposal([(4, 0, 0.3)], [])
    actual = merged(torch.tensor([3, 3]), [unknown, lookup], plan(3, 2, step_seconds=[1.0] * 4))
    assert actual.tokens.tolist() == [[3, 5, 8, 4], [3, 5, 0, 0]]
    assert actual.expected == pytest.approx((0.5 + 0.5 + 0.3, 0.5))
    four = merged(torch.tensor([3, 3]), [unknown, lookup], plan(4, 2, step_seconds=[1.0] * 5))
    assert four.tokens.tolist()[0] == [3, 5, 8, 4, 9] and four.expected == pytest.approx((1.3 + 0.25, 0.5))


def test_rows_are_cut_to_what_pays_for_all_and_filled_up() -> None:
    anchors, both = torch.tensor([3, 4]), [proposal(LOOKUP, []), proposal(MODEL, [(5, 0, 0.9)])]
    actual = merged(anchors, both, plan(7, 2))
    assert actual.tokens.tolist() == [[3, 5, 6, 7, 8, 9, 6], [4, 5, 0, 0, 0, 0, 0]]
    assert actual.parents.tolist() == [[-1, 0, 1, 2, 0, 1, 4], [-1, 0, -1, -1, -1, -1, -1]]
    dear = merged(anchors, both, plan(7, 2, step_seconds=[1, 1.1, 9, 9, 9, 9, 9, 9]))
    assert dear.tokens.tolist() == [[3, 5], [4, 5]] and dear.expected == pytest.approx((0.6, 0.9))
    doubted = merged(anchors, both, plan(7, 2, step_seconds=[1, 1.1, 9, 9, 9, 9, 9, 9], calibration=0.1))
    assert doubted.tokens.tolist() == [[3], [4]]
