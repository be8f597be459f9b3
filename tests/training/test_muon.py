"""The optimiser for matrices."""

import pytest
import torch

from blockdraft.training.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.4


def test_muon_goes_downhill() -> None:
    torch.manual_seed(0)
    weight, goal = torch.nn.Parameter(torch.zeros(4, 6)), torch.randn(4, 6)
    optimizer = Muon([weight], lr=0.05)
    before = float((weight - goal).detach().square().sum())
    for _ in range(50):
        optimizer.zero_grad()
        (weight - goal).square().sum().backward()
        optimizer.step()
    assert float((weight - goal).detach().square().sum()) < 0.2 * before
