from itertools import product

import pytest
import torch
from torch import Tensor
from twins import block_acceptance_prob, block_ratios, verify_block

from blockdraft.decode.block_verification import accept_block, block_acceptance_probs, residual_mass
from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import Proposal, SparseDistribution
from blockdraft.decode.verification import verify
from blockdraft.types import SamplingParams

V, DRAFT_CHOICE = 3, 3


def random_distributions(seed: int) -> tuple[Tensor, Tensor]:
    """p and q `[V, V]` after each token; some tokens have no mass in one of them, and one distribution is the same in
    both."""
    p, q = torch.rand(2, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    p[0, seed % V] = 0
    q[1, (seed + 1) % V] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if seed % 2:
        p[2] = q[2]
    return p, q


def chains(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return all chains that q draws after token 0: tokens, probability, acceptance probabilities, factors, q."""
    tokens = torch.tensor([(0, *rest) for rest in product(range(V), repeat=DRAFT_CHOICE)])
    tokens = tokens[(q[tokens[:, :-1], tokens[:, 1:]] > 0).all(1)]
    before, after = tokens[:, :-1], tokens[:, 1:]
    zeros = torch.zeros(len(tokens), 1)
    draft_token_p, draft_token_q = (torch.cat([zeros, dist[before, after]], 1) for dist in (p, q))
    sampled = draft_token_q[:, 1:].prod(-1)
    q_of_nodes = q[tokens]
    q_of_nodes[:, -1] = 0
    p_of_nodes = p[tokens] * (q_of_nodes > 0)
    return tokens, sampled, block_acceptance_probs(p_of_nodes, q_of_nodes, draft_token_p, draft_token_q), q_of_nodes


def ends(acceptance_probs: Tensor) -> Tensor:
    """Return the probability that the path ends at each node: its test passes, and none after it."""
    fails_behind = torch.cat(
        [(1 - acceptance_probs).flip(1).cumprod(1).flip(1)[:, 1:], torch.ones_like(acceptance_probs[:, :1])], 1
    )
    return acceptance_probs * fails_behind


@pytest.mark.parametrize("seed", range(12))
def test_block_verification_keeps_the_distribution_exactly(seed: int) -> None:
    """Summed over all chains, accepted path, bonus token and plain tokens after it have the distribution of p."""
    p, q = random_distributions(seed)
    tokens, sampled, (acceptance_probs, c), q_of_nodes = chains(p, q)
    end = ends(acceptance_probs)
    actual = torch.zeros((V,) * (DRAFT_CHOICE + 1), dtype=torch.float64)
    for row, node in product(range(len(tokens)), range(DRAFT_CHOICE + 1)):
        if end[row, node] < 1e-15:  # a residual that rounding has emptied
            continue
        rest = (p[tokens[row, node]] - c[row, node] * q_of_nodes[row, node]).clamp(min=0)
        dist = sampled[row] * end[row, node] * (rest / rest.sum())
        path = tuple(tokens[row, 1 : node + 1].tolist())
        for _ in range(DRAFT_CHOICE - node):  # plain tokens, each after the last dimension's
            dist = dist.unsqueeze(-1) * p
        actual[path] += dist
    exact = p[0]
    for _ in range(DRAFT_CHOICE):
        exact = exact.unsqueeze(-1) * p
    torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_block_verification_accepts_at_least_as_much_as_token_by_token(seed: int) -> None:
    p, q = random_distributions(seed)
    tokens, sampled, (acceptance_probs, _), _ = chains(p, q)
    block = sampled @ (ends(acceptance_probs) * torch.arange(DRAFT_CHOICE + 1)).sum(-1)
    before, after = tokens[:, :-1], tokens[:, 1:]
    one_by_one = (p[before, after] / q[before, after]).clamp(max=1).cumprod(1).sum(1)
    assert float(block) >= float(sampled @ one_by_one) - 1e-12
    if seed == 0:
        # And more where later draft tokens make up for earlier ones.
        assert float(block) > float(sampled @ one_by_one) + 0.01


@pytest.mark.parametrize("seed", range(6))
def test_acceptance_probs_are_those_of_the_paper(seed: int) -> None:
    p, q = random_distributions(seed)
    tokens, _, (acceptance_probs, c), _ = chains(p, q)
    for row in range(len(tokens)):
        chain = tokens[row].tolist()
        dists = [p[token].tolist() for token in chain], [q[token].tolist() for token in chain]
        ratios = block_ratios(chain, *dists)
        assert (1 / c[row]).tolist() == pytest.approx(ratios)
        expected = [block_acceptance_prob(i, ratios, *dists) for i in range(len(chain))]
        assert acceptance_probs[row].tolist() == pytest.approx(expected)


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("test", [0.0, 1 - 2**-53])
def test_extreme_numbers_accept_neither_the_impossible_nor_refuse_the_certain(test: float) -> None:
    tests = numbers(test, test)
    q = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]], dtype=torch.float64)
    for draft_token_p, accepted in ((0.0, 0), (1.0, 1)):
        p = torch.tensor([[[draft_token_p, 1 - draft_token_p], [0.0, 0.0]]], dtype=torch.float64)
        last, c = accept_block(p, q, numbers(0, draft_token_p), numbers(0, 0.5), tests)
        assert (int(last), float(c)) == (accepted, 1.0)


def test_equal_distributions_accept_everything() -> None:
    dist = numbers(0.1, 0.2, 0.7)
    dists = torch.stack([dist, dist, torch.zeros_like(dist)], 1)
    tests = numbers(*[1 - 2**-53] * 3)
    last, c = accept_block(dists, dists, numbers(0, 0.1, 0.7), numbers(0, 0.1, 0.7), tests)
    assert (int(last), float(c)) == (2, 1.0)


def test_mass_counts_what_q_cannot_offer() -> None:
    p, q = numbers(0.3, 0.2, 0.0), numbers(0.6, 0.4, 0.0)
    for c, mass in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.5), (torch.inf, 0.5)):
        assert float(residual_mass(p, q, numbers(c)[0])) == pytest.approx(mass)


V, K, COUNT, ROWS = 5, 3, 9, 60


def random_parents(generator: torch.Generator) -> list[int]:
    """Return the parents of a chain with random padding."""
    real = int(torch.randint(3, COUNT + 1, (), generator=generator))
    return [*range(-1, real - 1), *[-1] * (COUNT - real)]


def random_distribution(generator: torch.Generator, width: int) -> SparseDistribution:
    """Return a distribution after each node over some tokens, one of which may have no mass."""
    ids = torch.rand(COUNT, V, generator=generator).argsort(-1)[:, :width]
    probs = torch.rand(COUNT, width, generator=generator) ** 2
    probs[::3, 0] = 0
    return SparseDistribution(ids, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_readable_twin(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [random_parents(generator) for _ in range(ROWS)]
    q = [random_distribution(generator, K - row % 2) for row in range(ROWS)]  # of unequal widths
    dense = [torch.zeros(COUNT, V).scatter(1, dist.ids, dist.probs) for dist in q]
    tokens = torch.zeros(ROWS, COUNT, dtype=torch.int64)
    for row in range(ROWS):
        for node in range(1, COUNT):
            tokens[row, node] = torch.multinomial(dense[row][max(parents[row][node], 0)], 1, generator=generator)
    p = torch.rand(ROWS, COUNT, V, generator=generator) ** 2
    p[:, ::2, 1] = 0
    p = p / p.sum(-1, keepdim=True)
    uniforms, tests = torch.rand(2, ROWS, COUNT, dtype=torch.float64, generator=generator)
    proposal = Proposal(tokens, torch.tensor(parents), tuple(q))
    nothing: list[list[int]] = [[]] * ROWS
    params = [SamplingParams(temperature=1.0)] * ROWS
    verdict = verify(
        proposal, Distributions(p.log(), params, tokens, proposal.parents, nothing, nothing), uniforms, tests
    )
    for row in range(ROWS):
        real = parents[row].index(-1, 1) if -1 in parents[row][1:] else COUNT

        def values(table: Tensor, row: int = row, real: int = real) -> list[float]:
            actual: list[float] = table[row][:real].tolist()
            return actual

        numbers = values(uniforms), values(tests)
        expected = verify_block(values(tokens), values(p), values(torch.stack(dense)), *numbers)
        assert (verdict.path[row], verdict.bonus[row]) == expected


@pytest.mark.slow
def test_a_node_without_a_distribution_changes_no_distribution_before_it() -> None:
    """Draft token 0 is followed by no numbers. The tokens up to it have the target's distribution, and with it the path
    ends."""
    count, generator = 20_000, torch.Generator().manual_seed(0)
    q = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.4, 0.3], [0.2, 0.5, 0.3]])
    p = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    draft_tokens = torch.stack([torch.multinomial(dist, count, True, generator=generator) for dist in q], dim=1)
    tokens = torch.cat([torch.zeros(count, 1, dtype=torch.int64), draft_tokens], dim=1)
    parents = torch.arange(-1, 3).repeat(count, 1)
    logits = p.log().repeat(count, 1, 1)
    logits[:, 1:][draft_tokens == 0] = torch.nan
    uniforms, tests = torch.rand(2, count, 4, dtype=torch.float64, generator=generator)
    ids = torch.arange(3).repeat(4, 1)
    dist = SparseDistribution(ids, torch.cat([q, torch.zeros(1, 3)]))
    proposal, nothing = Proposal(tokens, parents, (dist,) * count), [[]] * count  # type: ignore[var-annotated]
    dists = Distributions(logits, [SamplingParams(temperature=1.0)] * count, tokens, parents, nothing, nothing)
    verdict = verify(proposal, dists, uniforms, tests)
    outputs = [
        [*own[1 : len(path)], bonus]
        for own, path, bonus in zip(tokens.tolist(), verdict.path, verdict.bonus, strict=True)
    ]
    assert all(0 not in output[:-1] for output in outputs)
    first = torch.tensor([output[0] for output in outputs]).bincount(minlength=3) / count
    assert torch.allclose(first, p[0], atol=0.015), first
    after = torch.multinomial(
        p[1], count, True, generator=generator
    ).tolist()  # sampled by the next step where there is no bonus
    seconds = [[*output, then][1] for output, then in zip(outputs, after, strict=True) if output[0] != 0]
    second = torch.tensor(seconds).bincount(minlength=3) / len(seconds)
    assert torch.allclose(second, p[1], atol=0.015), second
