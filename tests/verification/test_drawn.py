"""Drawn guesses agree with the readable twins, token by token."""

import pytest
import torch
from torch import Tensor
from twins import verify_block

from blockdraft.proposal import Proposal, SparseLaw
from blockdraft.sampling import Laws
from blockdraft.types import SamplingParams
from blockdraft.verification import verify

V, K, COUNT, ROWS = 5, 3, 9, 60


def random_parents(generator: torch.Generator) -> list[int]:
    """A chain, perhaps filled up."""
    real = int(torch.randint(3, COUNT + 1, (), generator=generator))
    return [*range(-1, real - 1), *[-1] * (COUNT - real)]


def random_law(generator: torch.Generator, width: int) -> SparseLaw:
    """A law after each node over some tokens, one of which may have no mass."""
    ids = torch.rand(COUNT, V, generator=generator).argsort(-1)[:, :width]
    probs = torch.rand(COUNT, width, generator=generator) ** 2
    probs[::3, 0] = 0
    return SparseLaw(ids, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_readable_twin(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [random_parents(generator) for _ in range(ROWS)]
    q = [random_law(generator, K - row % 2) for row in range(ROWS)]  # of unequal widths
    dense = [torch.zeros(COUNT, V).scatter(1, law.ids, law.probs) for law in q]
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
    verdict = verify(proposal, Laws(p.log(), params, tokens, proposal.parents, nothing, nothing), uniforms, tests)
    for row in range(ROWS):
        real = parents[row].index(-1, 1) if -1 in parents[row][1:] else COUNT

        def values(table: Tensor, row: int = row, real: int = real) -> list[float]:
            found: list[float] = table[row][:real].tolist()
            return found

        numbers = values(uniforms), values(tests)
        expected = verify_block(values(tokens), values(p), values(torch.stack(dense)), *numbers)
        assert (verdict.path[row], verdict.bonus[row]) == expected


def test_a_node_without_a_law_changes_no_law_before_it() -> None:
    """Guess 0 is followed by no numbers. The tokens up to it have the target's law, and with it the path ends."""
    count, generator = 20_000, torch.Generator().manual_seed(0)
    q = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.4, 0.3], [0.2, 0.5, 0.3]])
    p = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    guesses = torch.stack([torch.multinomial(law, count, True, generator=generator) for law in q], dim=1)
    tokens = torch.cat([torch.zeros(count, 1, dtype=torch.int64), guesses], dim=1)
    parents = torch.arange(-1, 3).repeat(count, 1)
    logits = p.log().repeat(count, 1, 1)
    logits[:, 1:][guesses == 0] = torch.nan
    uniforms, tests = torch.rand(2, count, 4, dtype=torch.float64, generator=generator)
    ids = torch.arange(3).repeat(4, 1)
    law = SparseLaw(ids, torch.cat([q, torch.zeros(1, 3)]))
    proposal, nothing = Proposal(tokens, parents, (law,) * count), [[]] * count  # type: ignore[var-annotated]
    laws = Laws(logits, [SamplingParams(temperature=1.0)] * count, tokens, parents, nothing, nothing)
    verdict = verify(proposal, laws, uniforms, tests)
    outputs = [
        [*own[1 : len(path)], bonus]
        for own, path, bonus in zip(tokens.tolist(), verdict.path, verdict.bonus, strict=True)
    ]
    assert all(0 not in output[:-1] for output in outputs)
    first = torch.tensor([output[0] for output in outputs]).bincount(minlength=3) / count
    assert torch.allclose(first, p[0], atol=0.015), first
    after = torch.multinomial(p[1], count, True, generator=generator).tolist()  # by the next cycle, where there is none
    seconds = [[*output, then][1] for output, then in zip(outputs, after, strict=True) if output[0] != 0]
    second = torch.tensor(seconds).bincount(minlength=3) / len(seconds)
    assert torch.allclose(second, p[1], atol=0.015), second
