"""Trees of two drafters that agree in part, and plans for them."""

from typing import Any

import torch

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan
from blockdraft.types import SamplingParams

Tree = list[tuple[int, int, float]]  # token, parent and probability of each draft token


def proposal(*rows: Tree) -> Proposal:
    count = 1 + max(map(len, rows))
    tokens = [[0, *(token for token, _, _ in row), *[0] * (count - 1 - len(row))] for row in rows]
    parents = [[-1, *(parent for _, parent, _ in row), *[-1] * (count - 1 - len(row))] for row in rows]
    acceptance_probs = tuple(tuple(acceptance_prob for _, _, acceptance_prob in row) for row in rows)
    return Proposal(torch.tensor(tokens), torch.tensor(parents), acceptance_probs=acceptance_probs)


def plan(budget: int, rows: int = 1, **others: Any) -> Plan:
    params = [SamplingParams()] * rows
    if "uniforms" in others:
        return SampledPlan(9, params, others.pop("uniforms"), budget, **others)
    return ChainPlan(9, params, **others).as_tree(budget)


LOOKUP: Tree = [(5, 0, 0.5), (6, 1, 0.4), (7, 2, 0.36)]
MODEL: Tree = [(5, 0, 0.6), (8, 0, 0.3), (9, 1, 0.3), (6, 2, 0.15)]
