"""Proposals of a DSpark drafter: chains, trees, and their size by the confidence head."""

import dataclasses
from pathlib import Path

import pytest
import torch
from draft_contexts import propose
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, SampledPlan, depths
from blockdraft.drafters.dspark.drafter import CANDIDATES, DSparkDrafter, calibrated
from blockdraft.drafters.dspark.network import DSparkNetwork
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

GREEDY = SamplingParams()
DEPTH = 8  # draft tokens of a whole block: as many as slots


def make(target: Target, folder: Path, **changes: object) -> DSparkDrafter:
    config, tensors = read_checkpoint(folder)
    network = DSparkNetwork(dataclasses.replace(config, output_multiplier=0.7, **changes))  # type: ignore[arg-type]
    own = network.state_dict()
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if name in own})
    return DSparkDrafter(network, target)


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_dspark_dir: Path) -> DSparkDrafter:
    return make(target, tiny_dspark_dir)


def bias(drafter: DSparkDrafter, before: int) -> Tensor:
    head = drafter.network.markov_head
    return (head.markov_w2.weight @ head.markov_w1.weight[before]).detach()


def dist(drafter: DSparkDrafter, logits: Tensor, before: int, temperature: float = 1.0) -> Tensor:
    """Readable twin of q at one position after a token."""
    return ((logits + bias(drafter, before)) / temperature).softmax(dim=-1)


def test_a_chain_follows_the_best_token_after_each_draft_token(drafter: DSparkDrafter) -> None:
    assert drafter.block_size == DEPTH + 1
    proposal, _, logits = propose(drafter, ChainPlan(DEPTH + 1, [GREEDY] * 3))
    assert proposal.q is None and proposal.parents.tolist() == [list(range(-1, DEPTH))] * 3
    for row, tokens in enumerate(proposal.tokens.tolist()):
        for slot in range(DEPTH):
            assert tokens[slot + 1] == dist(drafter, logits[row, slot], tokens[slot]).argmax()
    assert proposal.tokens[:, 1:].tolist() != logits.argmax(dim=-1).tolist()  # the bias matters here
    assert propose(drafter, ChainPlan(2, [GREEDY]))[0].tokens.shape == (1, 2)


def test_a_tree_scores_children_given_their_parent(target: Target, tiny_dspark_dir: Path) -> None:
    drafter = make(target, tiny_dspark_dir, enable_confidence_head=False)
    budget = 24
    chain, _, _ = propose(drafter, ChainPlan(DEPTH + 1, [GREEDY]))
    proposal, _, logits = propose(drafter, ChainPlan(DEPTH + 1, [GREEDY]).as_tree(budget))
    parents, tokens = proposal.parents[0].tolist(), proposal.tokens[0].tolist()
    depth, score = depths(proposal.parents)[0].tolist(), [1.0]
    walked, children = chain.tokens[0].tolist(), {}
    for node in range(budget + 1):
        if node:
            score.append(score[parents[node]] * children[parents[node]][tokens[node]].item())
        if depth[node] < DEPTH:
            corrected = logits[0, depth[node]] + bias(drafter, walked[depth[node]])
            candidates = corrected.topk(CANDIDATES).indices
            rest = corrected.exp().sum() - corrected[candidates].exp().sum()
            scores = (logits[0, depth[node]] + bias(drafter, tokens[node]))[candidates].exp()
            children[node] = torch.zeros(logits.size(-1)).scatter(0, candidates, scores / (scores.sum() + rest))
    assert score == sorted(score, reverse=True)
    inside = set(zip(parents, tokens, strict=True))
    missing = [
        score[node] * acceptance_prob
        for node, acceptance_probs in children.items()
        for token, acceptance_prob in enumerate(acceptance_probs.tolist())
        if (node, token) not in inside
    ]
    assert max(missing) <= score[-1] * (1 + 1e-4)
    path = [0]
    for token in chain.tokens[0, 1:].tolist():
        actual = [n for n in range(budget + 1) if parents[n] == path[-1] and tokens[n] == token]
        if not actual:
            break
        path += actual
    assert len(path) > 1  # the chain's beginning is in the tree


def acceptance_probs(drafter: DSparkDrafter, hidden: Tensor, tokens: list[int]) -> list[float]:
    head, w1 = drafter.network.confidence_head, drafter.network.markov_head.markov_w1.weight
    assert head is not None
    temperatures = drafter.network.config.confidence_temperatures or (1.0,) * DEPTH
    return [
        (head.proj(torch.cat([hidden[slot], w1[tokens[slot]]])) / temperatures[slot]).sigmoid().item()
        for slot in range(DEPTH)
    ]


@pytest.mark.parametrize("temperatures", [None, (4.0, 0.5, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0)])
def test_the_confidence_decides_how_many_draft_tokens_there_are(
    target: Target, tiny_dspark_dir: Path, temperatures: tuple[float, ...] | None
) -> None:
    drafter = make(target, tiny_dspark_dir, confidence_temperatures=temperatures)
    params = [GREEDY, SamplingParams(temperature=0.4)]
    whole, hidden, _ = propose(drafter, ChainPlan(DEPTH + 1, params))
    paths = []
    for row in range(2):
        actual = torch.tensor(acceptance_probs(drafter, hidden[row], whole.tokens[row].tolist()))
        paths.append(actual.cumprod(dim=0))
    counts = set()
    for cost in (0.0, 0.02, 0.05, 0.1, 0.3, 10.0):
        seconds = [1 + cost * n for n in range(DEPTH + 1)]
        cut, _, _ = propose(drafter, ChainPlan(DEPTH + 1, params, step_seconds=seconds))
        count = cut.tokens.size(1) - 1
        assert torch.equal(cut.tokens, whole.tokens[:, : count + 1])
        rates = [(2 + sum(path[:n].sum().item() for path in paths)) / seconds[n] for n in range(DEPTH + 1)]
        assert rates[count] == pytest.approx(max(rates))
        counts.add(count)
    assert {0, DEPTH} <= counts


def test_without_a_confidence_head_the_probabilities_decide(target: Target, tiny_dspark_dir: Path) -> None:
    drafter = make(target, tiny_dspark_dir, enable_confidence_head=False)
    seconds = [1 + 0.1 * n for n in range(DEPTH + 1)]
    whole, _, logits = propose(drafter, ChainPlan(DEPTH + 1, [GREEDY]))
    cut, _, _ = propose(drafter, ChainPlan(DEPTH + 1, [GREEDY], step_seconds=seconds))
    tokens = whole.tokens[0].tolist()
    best = torch.tensor([dist(drafter, logits[0, i], tokens[i])[tokens[i + 1]] for i in range(DEPTH)]).cumprod(dim=0)
    rates = [(1 + best[:n].sum().item()) / seconds[n] for n in range(DEPTH + 1)]
    assert rates[cut.tokens.size(1) - 1] == pytest.approx(max(rates))


def test_sampled_draft_tokens_have_the_distributions_that_are_handed_over(drafter: DSparkDrafter) -> None:
    rows = 300
    params = [SamplingParams(temperature=0.7)] * rows
    grid = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    draws = torch.stack([grid.roll(31 * depth) for depth in range(DEPTH)], dim=1)
    proposal, _, logits = propose(drafter, SampledPlan(DEPTH + 1, params, draws), same=True)
    assert proposal.q is not None
    for row in range(0, rows, 13):
        q, tokens = proposal.q[row], proposal.tokens[row].tolist()
        assert q is not None and q.ids.size(0) == DEPTH + 1
        for slot in range(DEPTH):
            best = dist(drafter, logits[row, slot], tokens[slot], 0.7).topk(q.ids.size(1))
            expected = torch.zeros(target_size(logits)).scatter(0, best.indices, best.values / best.values.sum())
            actual = torch.zeros(target_size(logits)).scatter(0, q.ids[slot], q.probs[slot])
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    first = proposal.q[0]
    assert first is not None
    sampled = proposal.tokens[:, 1].bincount(minlength=target_size(logits)) / rows
    assert (
        sampled - torch.zeros(target_size(logits)).scatter(0, first.ids[0], first.probs[0])
    ).abs().max() < 1.01 / rows


def target_size(logits: Tensor) -> int:
    return logits.size(-1)


@pytest.mark.parametrize("acceptance_prob", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_calibrated_distributions_stay_distributions(acceptance_prob: float) -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.1], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0]]).log()
    probs = calibrated(log_probs, torch.full((3,), acceptance_prob)).exp()
    assert (probs.sum(dim=-1) <= 1 + 1e-5).all()
    assert probs.argmax(dim=-1).tolist() == [0, 2, 1]
    torch.testing.assert_close(probs.amax(dim=-1), torch.full((3,), acceptance_prob), atol=1e-5, rtol=0)
    assert (probs[0, 1:] <= log_probs[0, 1:].exp() + 1e-6).all()  # no other token gains
