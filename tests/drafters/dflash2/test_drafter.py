"""Proposals of a DFlash2 drafter, compared with walks that go position by position."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_contexts import propose
from torch import Tensor

from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import ChainPlan, Plan, SampledPlan, TreePlan, depths
from blockdraft.decode.sampling import draw
from blockdraft.decode.verification import verify
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash2.drafter import DFlash2Drafter, walk
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

GREEDY = SamplingParams()
DEPTH, TOP_K = 7, 5


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_dflash2_dir: Path) -> DFlash2Drafter:
    config, tensors = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(config, DFlash2Config)
    network = DFlash2Network(replace(config, output_multiplier=0.3))  # distributions neither sure nor flat
    network.load_state_dict(tensors)
    return DFlash2Drafter(network, target)


def score(drafter: DFlash2Drafter, hidden: Tensor, logits: Tensor, before: int) -> Tensor:
    """Logits `[V]` of a position after the token `before`, where the selector has changed those of the candidates."""
    selector = drafter.network.candidate_selector
    best = logits.topk(TOP_K).indices
    gate = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
    return logits.scatter_add(0, best, selector.successor_codebook[best] @ gate).detach()


def only_candidates(scores: Tensor, logits: Tensor) -> Tensor:
    best = logits.topk(TOP_K).indices
    return torch.full_like(scores, -torch.inf).scatter(0, best, scores[best])


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 8, 15])
def test_walk(depth: int) -> None:
    table = torch.randint(6, (3, depth, 6), generator=torch.Generator().manual_seed(depth))
    table[:, 0] = table[:, 0, :1]
    for row in range(3):
        here, path = 0, []
        for slot in range(depth):
            here = int(table[row, slot, here])
            path.append(here)
        assert walk(table)[row].tolist() == path


def test_a_chain_follows_the_best_candidate_after_each_draft_token(drafter: DFlash2Drafter) -> None:
    proposal, hidden, logits = propose(drafter, ChainPlan(8, [GREEDY, SamplingParams(temperature=0.7), GREEDY]))
    assert proposal.parents.tolist() == [list(range(-1, DEPTH))] * 3 and proposal.q is None
    for row in range(3):
        token = 7
        for slot in range(DEPTH):
            scores = score(drafter, hidden[row, slot], logits[row, slot], token)
            token = int(only_candidates(scores, logits[row, slot]).argmax())
            assert int(proposal.tokens[row, slot + 1]) == token
    assert proposal.tokens[:, 1:].tolist() != logits.argmax(dim=-1).tolist()  # the selector had something to say
    assert propose(drafter, ChainPlan(4, [GREEDY]))[0].tokens.shape == (1, 4)
    assert propose(drafter, TreePlan(1, [GREEDY], 9))[0].tokens.tolist() == [[7]]


PLANS = {
    "chain": ChainPlan(8, [GREEDY] * 3),
    "short chain": ChainPlan(3, [GREEDY] * 3),
    "tree": ChainPlan(8, [GREEDY, SamplingParams(temperature=0.3), SamplingParams(temperature=2.0)]).as_tree(TOP_K),
    "paying chain": ChainPlan(
        8, [GREEDY, SamplingParams(temperature=0.3)], step_seconds=[1 + 0.05 * n for n in range(8)]
    ),
    "paying tree": ChainPlan(8, [GREEDY] * 2, step_seconds=[1 + 0.05 * n for n in range(TOP_K + 1)]).as_tree(TOP_K),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_new_network_drafts_exactly_as_v1(
    plan: Plan, target: Target, tiny_drafter_dir: Path, tiny_dflash2_dir: Path
) -> None:
    v1 = load_drafter(tiny_drafter_dir, target=target)
    config, _ = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(v1, DFlashDrafter) and isinstance(config, DFlash2Config)
    network = DFlash2Network(config)
    network.load_state_dict(read_checkpoint(tiny_drafter_dir)[1], strict=False)
    expected, actual = (propose(each, plan)[0] for each in (v1, DFlash2Drafter(network, target)))
    assert torch.equal(actual.tokens, expected.tokens) and torch.equal(actual.parents, expected.parents)
    assert actual.tokens.size(1) > 1


@pytest.mark.parametrize("budget", [3, 40])
def test_the_children_in_a_tree_are_scored_after_their_own_parent(drafter: DFlash2Drafter, budget: int) -> None:
    temperatures = [0.0, 1.0, 0.3, 2.0]
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    proposal, hidden, logits = propose(drafter, ChainPlan(8, params).as_tree(budget))
    assert proposal.tokens.shape == (4, budget + 1) and proposal.q is None
    depth = depths(proposal.parents)
    for row, temperature in enumerate(temperatures):
        parents, tokens = proposal.parents[row].tolist(), proposal.tokens[row].tolist()
        worth, missing, dist = [1.0], list[float](), dict[int, Tensor]()
        inside = set(zip(parents, tokens, strict=True))
        for node in range(budget + 1):
            if node:
                worth.append(dist[parents[node]][tokens[node]].item() * worth[parents[node]])
            slot = int(depth[row, node])
            if slot == DEPTH:
                continue
            scores = score(drafter, hidden[row, slot], logits[row, slot], tokens[node])
            dist[node] = (scores / (temperature or 1.0)).softmax(dim=-1)  # over the whole vocabulary
            candidates = logits[row, slot].topk(TOP_K).indices.tolist()
            missing += [worth[node] * dist[node][t].item() for t in candidates if (node, t) not in inside]
        assert all(later <= earlier * (1 + 1e-4) for earlier, later in zip(worth, worth[1:], strict=False))
        assert max(missing) <= worth[-1] * (1 + 1e-4)


@pytest.mark.parametrize("more", [{}, {"top_k": 3, "top_p": 0.9}])
def test_sampled_draft_tokens_have_the_distributions_that_are_handed_over(
    drafter: DFlash2Drafter, more: dict[str, float]
) -> None:
    rows = 600
    sampled = SamplingParams(temperature=0.7, **more)  # type: ignore[arg-type]
    draws = torch.rand(rows, DEPTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proposal, hidden, logits = propose(drafter, SampledPlan(8, [sampled] * rows, draws), same=True)
    assert proposal.q is not None and proposal.parents[0].tolist() == list(range(-1, DEPTH))
    for row in range(0, rows, 97):
        dist = proposal.q[row]
        assert dist is not None and dist.ids.shape == dist.probs.shape == (DEPTH + 1, TOP_K)
        for slot in range(DEPTH):
            scores = score(drafter, hidden[0, slot], logits[0, slot], int(proposal.tokens[row, slot]))
            exact = (only_candidates(scores, logits[0, slot]) / 0.7).softmax(dim=-1)
            if more:
                exact[exact.argsort(descending=True)[3:]] = 0.0
                exact /= exact.sum()
                before = exact.sort(descending=True).values.cumsum(0) - exact.sort(descending=True).values
                exact[exact.argsort(descending=True)[before >= 0.9]] = 0.0
                exact /= exact.sum()
            actual = torch.zeros_like(exact).scatter(0, dist.ids[slot], dist.probs[slot])
            torch.testing.assert_close(actual, exact)
            sampled = draw(dist.probs[None, slot : slot + 1], draws[row : row + 1, slot : slot + 1])
            assert int(dist.ids[slot, int(sampled)]) == int(proposal.tokens[row, slot + 1])
    assert len({tuple(tokens) for tokens in proposal.tokens.tolist()}) > 20


@pytest.mark.slow
def test_sampled_chains_leave_the_targets_distribution(drafter: DFlash2Drafter) -> None:
    """The first two tokens of many steps follow p, which has the candidates of q but other probabilities."""
    rows, vocabulary = 6000, drafter.config.vocab_size
    sampled = SamplingParams(temperature=1.0)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(rows, 12, generator=generator, dtype=torch.float64)
    proposal, _, _ = propose(drafter, SampledPlan(4, [sampled] * rows, numbers[:, :3]), same=True)
    table = torch.randn(4, vocabulary, vocabulary, generator=generator)  # by depth and token
    assert proposal.q is not None and proposal.q[0] is not None
    for slot in range(3):
        table[slot, :, proposal.q[0].ids[slot]] += proposal.q[0].probs[slot].clamp(min=0.01).log() + 8.0
    distributions = Distributions(
        table[torch.arange(4), proposal.tokens],
        [sampled] * rows,
        proposal.tokens,
        proposal.parents,
        [[7]] * rows,
        [[]] * rows,
    )
    verdict = verify(proposal, distributions, numbers[:, 3:7], numbers[:, 7:11])
    p = table.softmax(dim=-1)
    seconds = draw(p[1, torch.tensor(verdict.bonus)][:, None], numbers[:, 11:])[:, 0].tolist()
    counts: dict[tuple[int, int], int] = {}
    accepted = 0
    for row, path in enumerate(verdict.path):
        tokens = [*proposal.tokens[row, list(path)[1:]].tolist(), verdict.bonus[row], seconds[row]]
        counts[tokens[0], tokens[1]] = counts.get((tokens[0], tokens[1]), 0) + 1
        accepted += len(path) > 1
    assert 0.2 < accepted / rows < 0.9
    cells = [(a, b) for a in p[0, 7].topk(8).indices.tolist() for b in p[1, a].topk(6).indices.tolist()]
    expected = torch.tensor([rows * float(p[0, 7, a] * p[1, a, b]) for a, b in cells])
    actual = torch.tensor([counts.get(cell, 0) for cell in cells])
    assert len(cells) == 48 and expected.sum() > rows / 2
    chi_square = float(((actual - expected) ** 2 / expected).sum())
    assert chi_square < 48 + 4 * (2 * 48) ** 0.5


def test_refinement_keeps_what_is_settled(target: Target, tiny_dflash2_dir: Path) -> None:
    config, tensors = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(config, DFlash2Config)
    network = DFlash2Network(config)
    network.load_state_dict(tensors)
    drafter = DFlash2Drafter(network, target)
    drafter.noise_schedule = "linear"
    for plan in (
        ChainPlan(8, [GREEDY], draft_passes=7),
        TreePlan(8, [SamplingParams(temperature=0.5)], 30, draft_passes=7),
        ChainPlan(8, [GREEDY], step_seconds=[1.0] * 8, draft_passes=7),
    ):
        proposal, _, _ = propose(drafter, plan)
        assert torch.isfinite(proposal.tokens).all() and proposal.tokens.size(1) >= 8
