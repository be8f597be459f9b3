"""Learning rates, and which optimiser trains what."""

import pytest
import torch

from blockdraft.drafters.dflash.train import DFlashRecipe, DFlashVariant
from blockdraft.training.muon import Muon
from blockdraft.training.optimizers import make_optimizers, rate, set_rate
from blockdraft.training.recipe import Recipe


def test_rates_rise_and_fall() -> None:
    cosine = [rate(step, 100, Recipe(warmup=0.1)) for step in range(100)]
    assert cosine[:3] == pytest.approx([0.1, 0.2, 0.3]) and cosine[9] == pytest.approx(1.0)
    assert cosine[55] == pytest.approx(0.5) and 0 < cosine[99] < 0.01
    assert all(later <= earlier for earlier, later in zip(cosine[10:], cosine[11:], strict=False))
    linear = [rate(step, 100, Recipe(warmup=0.1, schedule="linear", final=0.2)) for step in range(100)]
    assert linear[55] == pytest.approx(0.6) and linear[99] == pytest.approx(0.2, abs=0.02)
    wsd = [rate(step, 100, Recipe(warmup=0.1, schedule="wsd")) for step in range(100)]
    assert set(wsd[10:81]) == {1.0} and wsd[90] == pytest.approx(0.5) and wsd[99] < 0.01
    assert rate(0, 1, Recipe(warmup=0)) == 1


def test_muon_trains_matrices() -> None:
    named = [("fc.weight", torch.nn.Parameter(torch.ones(2, 3))), ("norm.weight", torch.nn.Parameter(torch.ones(3)))]
    recipe = Recipe(optimizer="muon", learning_rate=0.1, muon_learning_rate=0.2)
    muon, adamw = make_optimizers(named, DFlashVariant(recipe), recipe)
    assert isinstance(muon, Muon) and muon.param_groups[0]["params"] == [named[0][1]]
    assert isinstance(adamw, torch.optim.AdamW) and adamw.param_groups[0]["params"] == [named[1][1]]
    set_rate([muon, adamw], 0.5)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.1) and adamw.param_groups[0]["lr"] == pytest.approx(0.05)
    [only] = make_optimizers(named, DFlashVariant(DFlashRecipe()), Recipe())
    assert len(only.param_groups[0]["params"]) == 2
