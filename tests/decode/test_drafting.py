"""Chains that grow while one more draft token pays."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdraft.decode.drafting import GrowingChain, draft_chain, paying_part
from blockdraft.decode.proposal import ChainPlan
from blockdraft.types import SamplingParams

PROBS = torch.tensor([0.7, 0.6, 0.5, 0.45])
KEPT = torch.tensor([3, 5, 8])


def after_one(seconds: list[float], calibration: float = 1.0) -> GrowingChain:
    """Return a chain of one draft token; the second sequence gets none."""
    growing = GrowingChain(torch.tensor([1.0, 0.0]), seconds, calibration)
    growing.add(torch.tensor([0.5, 0.0]))
    return growing


def test_another_draft_token_pays_if_its_tokens_are_worth_its_time() -> None:
    # Of one draft token a row 2.5 tokens, of two 2.75.
    assert after_one([1.0, 1.0, 1.09]).pays()
    assert not after_one([1.0, 1.0, 1.1]).pays()
    assert not after_one([1.0, 1.0, 1.09], calibration=0.5).pays()
    assert not after_one([1.0, 1.0]).pays(), "there is no time of a longer chain"
    assert after_one([1.0, 1.0, 1.09]).expected.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("step", [0.05, 0.2, 0.35, 0.6, 2.0])
def test_a_whole_chain_is_cut_where_one_that_grows_ends(step: float) -> None:
    seconds = [1 + step * count for count in range(5)]
    best = list(PROBS)

    def next_logits(tokens: Tensor) -> Tensor:
        prob = best.pop(0)
        return torch.stack([prob, *[(1 - prob) / 2] * 2]).log()[None]

    plan = replace(ChainPlan(5, [SamplingParams()]), step_seconds=seconds)
    grown = draft_chain(torch.tensor([9]), plan, [4], next_logits, KEPT)
    tokens, expected = paying_part(torch.tensor([[9, 3, 3, 3, 3]]), PROBS[None], seconds, 1.0)
    assert grown.tokens.tolist() == tokens.tolist() and grown.expected == pytest.approx(expected.tolist())


def test_sequences_have_rooms_of_their_own() -> None:
    plan = ChainPlan(4, [SamplingParams()] * 3)
    grown = draft_chain(torch.tensor([9, 9, 9]), plan, [2, 0, 1], lambda tokens: torch.eye(3)[tokens % 3])
    assert grown.tokens.tolist() == [[9, 0, 0]] * 3
    assert grown.parents.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]
