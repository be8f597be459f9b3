"""Losslessness on exactly known small laws, and proof that the same tests catch broken rules."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from blockdraft.proposal import Proposal, chain
from blockdraft.verification import Verdict, verify
from blockdraft.verification.reference import verify_row

V = 3
# A small language: the law of the next token given the last one.
BIGRAM = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
CHAIN = Proposal(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[-1, 0, 1, 2]]))
TREE = Proposal(torch.tensor([[0, 0, 1, 0, 2, 1]]), torch.tensor([[-1, 0, 0, 1, 1, 4]]))
Rule = Callable[[Proposal, Tensor, Tensor], Verdict]


def committed(proposal: Proposal, verdict: Verdict) -> list[int]:
    return [int(proposal.tokens[0, node]) for node in verdict.path[0][1:]] + verdict.bonus


def sequences(proposal: Proposal, rule: Rule, length: int, grid: int) -> Counter[tuple[int, ...]]:
    """First `length` tokens of decoding with one proposal and plain draws behind it, over a grid of random numbers."""
    probs = BIGRAM[proposal.tokens]
    depth = (proposal.parents >= 0).long()  # depth of each node, parents first
    for i in range(1, depth.size(1)):
        depth[0, i] = depth[0, int(proposal.parents[0, i])] + 1
    found: Counter[tuple[int, ...]] = Counter()
    points = [(k + 0.5) / grid for k in range(grid)]
    for numbers in product(points, repeat=length):
        u = torch.tensor([*numbers, *[0.5] * 8], dtype=torch.float64)
        tokens = committed(proposal, rule(proposal, probs, u[depth]))
        while len(tokens) < length:
            law = BIGRAM[tokens[-1]].double().cumsum(0)
            tokens.append(int(torch.searchsorted(law, u[len(tokens)] * law[-1], right=True)))
        found[tuple(tokens[:length])] += 1
    return found


def distance(found: Counter[tuple[int, ...]], length: int) -> float:
    """Total variation between the sequences found and the law of the language after token 0."""
    total, gap = sum(found.values()), 0.0
    for tokens in product(range(V), repeat=length):
        exact, last = 1.0, 0
        for token in tokens:
            exact, last = exact * float(BIGRAM[last, token]), token
        gap += abs(exact - found[tokens] / total)
    return gap / 2


@pytest.mark.parametrize("proposal", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_output_has_the_target_law(proposal: Proposal, length: int) -> None:
    # 20 numbers a position resolve probabilities that are multiples of 0.1 without error.
    assert distance(sequences(proposal, verify, length, 20 if length < 3 else 10), length) < 1e-6


def accept_everything(proposal: Proposal, probs: Tensor, uniforms: Tensor) -> Verdict:
    path = list(range(proposal.tokens.size(1)))
    return Verdict([path], [int(probs[0, -1].argmax())])


def bonus_of_the_anchor(proposal: Proposal, probs: Tensor, uniforms: Tensor) -> Verdict:
    verdict = verify(proposal, probs, uniforms)
    return Verdict(verdict.path, verify(proposal, probs[:, :1].expand_as(probs), uniforms).bonus)


def accept_with_fresh_numbers(proposal: Proposal, probs: Tensor, uniforms: Tensor) -> Verdict:
    """Chosen guesses verified as if drawn with q = p would be: accepted too often, no residual."""
    verdict = verify(proposal, probs, uniforms * 0.5)
    return verdict


@pytest.mark.parametrize("rule", [accept_everything, bonus_of_the_anchor, accept_with_fresh_numbers])
def test_broken_rules_are_caught(rule: Rule) -> None:
    assert distance(sequences(CHAIN, rule, 2, 20), 2) > 0.05


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_readable_twin(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 12
    tokens = torch.randint(V, (2, count), generator=generator)
    parents = torch.tensor(
        [[-1] + [int(torch.randint(i, (), generator=generator)) for i in range(1, count)] for _ in range(2)]
    )
    probs = torch.rand(2, count, V, generator=generator).softmax(-1)
    uniforms = torch.rand(2, count, dtype=torch.float64, generator=generator)
    verdict = verify(Proposal(tokens, parents), probs, uniforms)
    for row in range(2):

        def draw_at(node: int, row: int = row) -> int:
            total = 0.0
            for token in range(V):
                total += float(probs[row, node, token])
                if float(uniforms[row, node]) < total:
                    return token
            return V - 1

        expected = verify_row(tokens[row].tolist(), parents[row].tolist(), draw_at)
        assert (verdict.path[row], verdict.bonus[row]) == expected


def test_greedy_accepts_the_longest_matching_prefix() -> None:
    probs = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1]]), V).float()
    verdict = verify(chain(torch.tensor([[0, 1, 2, 2]])), probs, torch.rand(1, 4, dtype=torch.float64))
    assert (verdict.path, verdict.bonus) == ([[0, 1, 2]], [0])


def test_drawn_guesses_are_refused() -> None:
    proposal = Proposal(CHAIN.tokens, CHAIN.parents, q=torch.full((1, 4, V), 1 / V))
    with pytest.raises(NotImplementedError, match="q is set"):
        verify(proposal, BIGRAM[CHAIN.tokens], torch.zeros(1, 4, dtype=torch.float64))
