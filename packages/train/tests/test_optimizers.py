"""Muon, and which optimizer trains what."""

import pytest
import torch

from blockdraft_train.optimizers import Muon, make_optimizers, orthogonalize, set_rate
from blockdraft_train.recipe import Recipe
from blockdraft_train.variants.dflash import DFlashRecipe, DFlashVariant


def test_muon_trains_matrices() -> None:
    named = [("fc.weight", torch.nn.Parameter(torch.ones(2, 3))), ("norm.weight", torch.nn.Parameter(torch.ones(3)))]
    recipe = DFlashRecipe(optimizer="muon", learning_rate=0.1, muon_learning_rate=0.2)
    muon, adamw = make_optimizers(named, DFlashVariant(recipe), recipe)
    assert isinstance(muon, Muon) and muon.param_groups[0]["params"] == [named[0][1]]
    assert isinstance(adamw, torch.optim.AdamW) and adamw.param_groups[0]["params"] == [named[1][1]]
    set_rate([muon, adamw], 0.5)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.1) and adamw.param_groups[0]["lr"] == pytest.approx(0.05)
    [only] = make_optimizers(named, DFlashVariant(DFlashRecipe()), Recipe())
    assert len(only.param_groups[0]["params"]) == 2


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
