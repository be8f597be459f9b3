"""Rules for the proposals of all drafters of the DFlash family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_contexts import propose

from blockdraft.decode.proposal import ChainPlan, SampledPlan, TreePlan
from blockdraft.drafters import entries
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

GREEDY = SamplingParams()
# Factors on the logits with which distributions are neither sure nor flat.
FACTORS = {"dflash": 0.7, "dflash2": 0.3, "dspark": 0.7}


@pytest.fixture(scope="module", params=FACTORS)
def drafter(request: pytest.FixtureRequest, target: Target, tiny_drafter_dir: Path) -> DFlashDrafter:
    kind: str = request.param
    folder = tiny_drafter_dir if kind == "dflash" else request.getfixturevalue(f"tiny_{kind}_dir")
    config, tensors = read_checkpoint(folder)
    spec: Any = entries()[kind]
    # A confidence that is neither sure nor hopeless.
    more = {"confidence_temperatures": (30.0,) * config.block_size} if kind == "dspark" else {}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = spec.network(replace(config, output_multiplier=FACTORS[kind], **more))
    if kind != "dflash":
        network.load_state_dict(tensors)
    made: DFlashDrafter = spec.drafter(network, target)
    return made


def seconds(cost: float, count: int) -> list[float]:
    """Times of steps with up to `count` draft tokens, each of which costs this share of a plain step."""
    return [1 + cost * n for n in range(count + 1)]


def test_greedy_sequences_are_not_sampled(drafter: DFlashDrafter) -> None:
    size = drafter.block_size
    params = [GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=1)]
    draws = torch.full((3, size - 1), 0.999, dtype=torch.float64)
    best, _, _ = propose(drafter, ChainPlan(size, params))
    proposal, _, _ = propose(drafter, SampledPlan(size, params, draws))
    assert proposal.q is not None and [dist is None for dist in proposal.q] == [True, False, False]
    assert (proposal.tokens == best.tokens).all(dim=1).tolist() == [True, False, True]
    assert propose(drafter, SampledPlan(size, [GREEDY] * 3, draws))[0].q is None


@pytest.mark.parametrize("budget", [0, 20])
def test_step_times_decide_how_many_draft_tokens_there_are(drafter: DFlashDrafter, budget: int) -> None:
    size, params = drafter.block_size, [GREEDY, SamplingParams(temperature=0.4)]
    whole, _, _ = propose(drafter, ChainPlan(size, params).as_tree(budget))
    most, counts = budget or size - 1, set()
    for cost in (0.0, 0.03, 0.1, 0.3, 10.0):
        plan = ChainPlan(size, params, step_seconds=seconds(cost, most)).as_tree(budget)
        cut, _, _ = propose(drafter, plan)
        count = cut.tokens.size(1) - 1
        assert torch.equal(cut.tokens, whole.tokens[:, : count + 1])
        assert torch.equal(cut.parents, whole.parents[:, : count + 1])
        counts.add(count)
    assert {0, most} < counts


def test_the_length_of_a_sampled_chain_does_not_depend_on_the_sample(drafter: DFlashDrafter) -> None:
    size, params, counts = drafter.block_size, [SamplingParams(temperature=0.5)] * 2, set()
    for cost in (0.0, 0.02, 0.05, 0.1, 0.3, 10.0):
        chosen, _, _ = propose(drafter, ChainPlan(size, params, step_seconds=seconds(cost, size - 1)))
        for number in (0.0, 0.5, 0.99):
            draws = torch.full((2, size - 1), number, dtype=torch.float64)
            whole, _, _ = propose(drafter, SampledPlan(size, params, draws))
            cut, _, _ = propose(drafter, SampledPlan(size, params, draws, step_seconds=seconds(cost, size - 1)))
            count = cut.tokens.size(1)
            assert count == chosen.tokens.size(1) and torch.equal(cut.tokens, whole.tokens[:, :count])
            assert cut.q is not None and cut.q[0] is not None and len(cut.q[0].ids) == count
        counts.add(chosen.tokens.size(1))
    assert {1, size} < counts


def test_an_extreme_temperature_makes_sound_trees(drafter: DFlashDrafter) -> None:
    size = drafter.block_size
    chain, _, _ = propose(drafter, ChainPlan(size, [GREEDY]))
    tree, _, _ = propose(drafter, TreePlan(size, [SamplingParams(temperature=1e-30)], 40))  # the least there is
    assert tree.tokens[0, :size].tolist() == chain.tokens[0].tolist()
