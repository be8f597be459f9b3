import torch
from torch import nn

from blockdraft.training.state import gathered, gathered_weights, restore


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_was_gathered_goes_on_as_it_would_have() -> None:
    """Weights and moments of several optimisers come back, and further steps are the same."""
    states = []
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in module]
    for _ in range(3):
        stepped(module, *optimizers[:1])
        stepped(module, *optimizers[1:])
        states.append(gathered(module, optimizers))
    restore(module, optimizers, {**states[0], "step": 1})
    for state in states[1:]:
        stepped(module, *optimizers[:1])
        stepped(module, *optimizers[1:])
        found = gathered(module, optimizers)
        for name, weight in state["network"].items():
            assert torch.equal(found["network"][name], weight)
            assert torch.equal(gathered_weights(module)[name], weight)
