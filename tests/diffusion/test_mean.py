"""The running mean of the weights."""

import torch
from torch import nn

from blockdraft.diffusion.mean import RunningMean


def network(value: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def test_of_the_first_steps_it_remembers_little() -> None:
    made = network(0.0)
    mean, wanted = RunningMean(made, 0.15), 0.0
    for step in range(4):
        nn.init.constant_(made.weight, step + 1.0)
        mean.update(step)
        decay = min(0.15, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * (step + 1)
        assert abs(mean.weights["weight"].item() - wanted) < 1e-6
    plain = RunningMean(made, 0.0)
    nn.init.constant_(made.weight, 9.0)
    plain.update(3)
    assert plain.weights["weight"].item() == 9.0


def test_it_takes_the_place_of_the_weights_for_a_while() -> None:
    made = network(5.0).train()
    mean = RunningMean(made, 0.9, {"weight": torch.full((1, 1), 2.0)})
    with mean.in_place():
        assert made.weight.item() == 2.0 and not made.training
    assert made.weight.item() == 5.0 and made.training
    mean.put()
    assert made.weight.item() == 2.0
