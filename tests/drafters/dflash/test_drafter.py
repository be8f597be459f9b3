"""Proposals of a DFlash drafter: chains, trees, sampled draft tokens, and their number."""

import dataclasses
from pathlib import Path

import pytest
import torch
from draft_contexts import propose

from blockdraft.decode.proposal import SPARSE_SIZE, ChainPlan, SampledPlan, TreePlan, depths
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

GREEDY = SamplingParams()
DEPTH = 7  # draft tokens of a whole block


def make(target: Target, folder: Path) -> DFlashDrafter:
    # Makes distributions neither sharp nor flat.
    config = dataclasses.replace(read_checkpoint(folder)[0], output_multiplier=0.7)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return DFlashDrafter(DFlashNetwork(config), target)


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_drafter_dir: Path) -> DFlashDrafter:
    return make(target, tiny_drafter_dir)


def test_a_chain_is_the_argmax_of_each_position(drafter: DFlashDrafter) -> None:
    for temperature in (0.0, 0.5):
        proposal, _, logits = propose(drafter, ChainPlan(8, [SamplingParams(temperature=temperature)] * 3))
        assert proposal.tokens[:, 1:].tolist() == logits.argmax(dim=-1).tolist()
        assert proposal.parents.tolist() == [list(range(-1, DEPTH))] * 3
        assert proposal.q is None
    shorter, _, _ = propose(drafter, ChainPlan(4, [GREEDY]))
    assert shorter.tokens.shape == (1, 4)
    assert propose(drafter, TreePlan(1, [GREEDY], 9))[0].tokens.tolist() == [[7]]


@pytest.mark.parametrize("budget", [3, 40])
def test_a_tree_follows_the_distributions_at_each_sequences_temperature(drafter: DFlashDrafter, budget: int) -> None:
    temperatures = [0.0, 1.0, 0.3, 2.0]
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    proposal, _, logits = propose(drafter, ChainPlan(8, params).as_tree(budget))
    assert proposal.tokens.shape == (4, budget + 1) and proposal.q is None
    depth = depths(proposal.parents)
    for row, temperature in enumerate(temperatures):
        probs = (logits[row] / (temperature or 1.0)).softmax(dim=-1)
        parents, tokens, score = proposal.parents[row].tolist(), proposal.tokens[row].tolist(), [1.0]
        for node in range(1, budget + 1):
            score.append(score[parents[node]] * probs[depth[row, node] - 1, tokens[node]].item())
        assert score == sorted(score, reverse=True)
        # No node that could have been added, a sibling or a child of a leaf, is likelier than the last one.
        inside = set(zip(parents, tokens, strict=True))
        missing = [
            score[node] * probs[depth[row, node], token].item()
            for node in range(budget + 1)
            if depth[row, node] < DEPTH
            for token in probs[depth[row, node]].topk(budget + 1).indices.tolist()
            if (node, token) not in inside
        ]
        assert max(missing) <= score[-1] * (1 + 1e-5)
    assert depth.max() <= DEPTH and len(set(depth.amax(dim=1).tolist())) > (1 if budget > 3 else 0)


def test_sampled_draft_tokens_have_the_distributions_that_are_handed_over(drafter: DFlashDrafter) -> None:
    rows = 400
    params = [SamplingParams(temperature=0.7, top_k=90)] * rows
    grid = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    draws = torch.stack([grid.roll(31 * depth) for depth in range(DEPTH)], dim=1)
    proposal, _, logits = propose(drafter, SampledPlan(8, params, draws), same=True)
    assert proposal.q is not None and proposal.parents[0].tolist() == list(range(-1, DEPTH))
    dist = proposal.q[0]
    assert dist is not None and dist.ids.shape == dist.probs.shape == (DEPTH + 1, SPARSE_SIZE)
    assert (dist.ids.dtype, dist.probs.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(dist.probs.sum(dim=-1), torch.ones(DEPTH + 1))
    for depth in range(DEPTH):
        exact = (logits[0, depth] / 0.7).softmax(dim=-1)
        best = exact.topk(SPARSE_SIZE)
        assert set(dist.ids[depth].tolist()) == set(best.indices.tolist())
        expected = torch.zeros_like(exact).scatter(0, best.indices, best.values / best.values.sum())
        torch.testing.assert_close(torch.zeros_like(exact).scatter(0, dist.ids[depth], dist.probs[depth]), expected)
        sampled = proposal.tokens[:, depth + 1].bincount(minlength=len(exact)) / rows
        assert (sampled - expected).abs().max() <= 1.01 / rows  # a grid of numbers meets each distribution exactly


def test_refinement_settles_the_surest_draft_tokens_for_chains_trees_and_samples(
    target: Target, tiny_drafter_dir: Path
) -> None:
    drafter = make(target, tiny_drafter_dir)
    chain, _, first = propose(drafter, ChainPlan(8, [SamplingParams(temperature=1.0)], draft_passes=2))
    # 1 - cos(45 degrees) of 7 draft tokens are 2.
    surest = sorted(first[0].softmax(dim=-1).amax(dim=-1).topk(2).indices.tolist())
    block = torch.full((1, 8), drafter.config.mask_token_id)
    block[0, 0] = 7
    for position in surest:
        block[0, position + 1] = first[0, position].argmax()
    state = drafter.new_state(1, 40)
    hidden_states = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(5))
    drafter.observe(state, torch.zeros(1, 9, dtype=torch.long), hidden_states, [9])
    second = drafter.draft_logits(state, block)[0, 1:].argmax(dim=-1)
    expected = [int(block[0, i + 1] if i in surest else second[i]) for i in range(DEPTH)]
    assert chain.tokens[0, 1:].tolist() == expected

    tree, _, _ = propose(drafter, TreePlan(8, [SamplingParams(temperature=1.0)], 60, draft_passes=2))
    candidates = [set(tree.tokens[0, depths(tree.parents)[0] == i + 1].tolist()) for i in range(DEPTH)]
    assert tree.tokens.size(1) == 61
    assert all(candidates[i] <= {expected[i]} for i in surest)
    assert max(len(tokens) for tokens in candidates) > 1

    draws = torch.full((1, DEPTH), 0.9, dtype=torch.float64)
    sampled, _, _ = propose(drafter, SampledPlan(8, [SamplingParams(temperature=1.0)], draws, draft_passes=2))
    assert sampled.q is not None and sampled.q[0] is not None
    certain = (sampled.q[0].probs[:DEPTH].amax(dim=-1) == 1).nonzero().flatten().tolist()
    assert certain == surest
    assert [int(sampled.tokens[0, i + 1]) for i in surest] == [expected[i] for i in surest]
