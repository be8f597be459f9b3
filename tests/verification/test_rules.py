from itertools import product

import pytest
import torch
from torch import Tensor
from twins import block_chance, block_ratios

from blockdraft.verification.rules import accept_block, block_chances, residual_mass

V, GUESSES = 3, 3


def random_laws(seed: int) -> tuple[Tensor, Tensor]:
    """p and q `[V, V]` after each token; some tokens have no mass in one of them, and one law is the same in both."""
    p, q = torch.rand(2, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    p[0, seed % V] = 0
    q[1, (seed + 1) % V] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if seed % 2:
        p[2] = q[2]
    return p, q


def chains(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """All chains of guesses that q can draw after token 0: tokens, their probability, chances and factors, q."""
    tokens = torch.tensor([(0, *rest) for rest in product(range(V), repeat=GUESSES)])
    tokens = tokens[(q[tokens[:, :-1], tokens[:, 1:]] > 0).all(1)]
    before, after = tokens[:, :-1], tokens[:, 1:]
    zeros = torch.zeros(len(tokens), 1)
    guess_p, guess_q = (torch.cat([zeros, law[before, after]], 1) for law in (p, q))
    drawn = guess_q[:, 1:].prod(-1)
    q_of_nodes = q[tokens]
    q_of_nodes[:, -1] = 0
    p_of_nodes = p[tokens] * (q_of_nodes > 0)
    return tokens, drawn, block_chances(p_of_nodes, q_of_nodes, guess_p, guess_q), q_of_nodes


def ends(chances: Tensor) -> Tensor:
    """The chance that a path ends at each node: its test holds and none behind it."""
    fails_behind = torch.cat([(1 - chances).flip(1).cumprod(1).flip(1)[:, 1:], torch.ones_like(chances[:, :1])], 1)
    return chances * fails_behind


@pytest.mark.parametrize("seed", range(12))
def test_block_verification_keeps_the_law_exactly(seed: int) -> None:
    """Summed over all that can be drawn, path and bonus and plain tokens behind them have the law of p."""
    p, q = random_laws(seed)
    tokens, drawn, (chances, c), q_of_nodes = chains(p, q)
    end = ends(chances)
    found = torch.zeros((V,) * (GUESSES + 1), dtype=torch.float64)
    for row, node in product(range(len(tokens)), range(GUESSES + 1)):
        if end[row, node] < 1e-15:  # a residual that rounding has emptied
            continue
        rest = (p[tokens[row, node]] - c[row, node] * q_of_nodes[row, node]).clamp(min=0)
        law = drawn[row] * end[row, node] * (rest / rest.sum())
        path = tuple(tokens[row, 1 : node + 1].tolist())
        for _ in range(GUESSES - node):  # plain tokens, each after the last dimension's
            law = law.unsqueeze(-1) * p
        found[path] += law
    exact = p[0]
    for _ in range(GUESSES):
        exact = exact.unsqueeze(-1) * p
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_block_verification_accepts_at_least_as_much_as_token_by_token(seed: int) -> None:
    p, q = random_laws(seed)
    tokens, drawn, (chances, _), _ = chains(p, q)
    block = drawn @ (ends(chances) * torch.arange(GUESSES + 1)).sum(-1)
    before, after = tokens[:, :-1], tokens[:, 1:]
    one_by_one = (p[before, after] / q[before, after]).clamp(max=1).cumprod(1).sum(1)
    assert float(block) >= float(drawn @ one_by_one) - 1e-12
    if seed == 0:
        assert float(block) > float(drawn @ one_by_one) + 0.01  # and more where later guesses make up for earlier ones


@pytest.mark.parametrize("seed", range(6))
def test_chances_are_those_of_the_paper(seed: int) -> None:
    p, q = random_laws(seed)
    tokens, _, (chances, c), _ = chains(p, q)
    for row in range(len(tokens)):
        chain = tokens[row].tolist()
        laws = [p[token].tolist() for token in chain], [q[token].tolist() for token in chain]
        ratios = block_ratios(chain, *laws)
        assert (1 / c[row]).tolist() == pytest.approx(ratios)
        expected = [block_chance(i, ratios, *laws) for i in range(len(chain))]
        assert chances[row].tolist() == pytest.approx(expected)


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("test", [0.0, 1 - 2**-53])
def test_extreme_numbers_accept_neither_the_impossible_nor_refuse_the_certain(test: float) -> None:
    tests = numbers(test, test)
    q = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]], dtype=torch.float64)
    for guess_p, accepted in ((0.0, 0), (1.0, 1)):
        p = torch.tensor([[[guess_p, 1 - guess_p], [0.0, 0.0]]], dtype=torch.float64)
        last, c = accept_block(p, q, numbers(0, guess_p), numbers(0, 0.5), tests)
        assert (int(last), float(c)) == (accepted, 1.0)


def test_equal_laws_accept_everything() -> None:
    law = numbers(0.1, 0.2, 0.7)
    laws = torch.stack([law, law, torch.zeros_like(law)], 1)
    tests = numbers(*[1 - 2**-53] * 3)
    last, c = accept_block(laws, laws, numbers(0, 0.1, 0.7), numbers(0, 0.1, 0.7), tests)
    assert (int(last), float(c)) == (2, 1.0)


def test_mass_counts_what_q_cannot_offer() -> None:
    p, q = numbers(0.3, 0.2, 0.0), numbers(0.6, 0.4, 0.0)
    for c, mass in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.5), (torch.inf, 0.5)):
        assert float(residual_mass(p, q, numbers(c)[0])) == pytest.approx(mass)
