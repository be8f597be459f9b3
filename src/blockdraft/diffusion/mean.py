"""The running mean of the weights, which is what a training measures and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RunningMean:
    """Of a network's parameters, by their names.

    Args:
        decay: How much of it stays at a step; with 0 it is the weights themselves.
        weights: What it is now; None begins with the network's own.
    """

    def __init__(self, network: nn.Module, decay: float, weights: Mapping[str, Tensor] | None = None) -> None:
        self._network, self._decay = network, decay
        self.weights = _copied(network)
        for name, weight in self.weights.items():
            if weights is not None:
                weight.copy_(weights[name])

    def update(self, step: int) -> None:
        """Take in the weights behind a step, from 0 on. Of the first ones there is little that is worth remembering."""
        decay = min(self._decay, (1 + step) / (10 + step)) if self._decay else 0.0
        for name, weight in self._network.named_parameters():
            self.weights[name].lerp_(weight.detach(), 1 - decay)

    @torch.no_grad()
    def put(self) -> None:
        """Make it the network's weights."""
        for name, weight in self._network.named_parameters():
            weight.copy_(self.weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the network compute with it for a while, in evaluation mode."""
        own = _copied(self._network)
        self.put()
        self._network.eval()
        yield
        self._network.train()
        with torch.no_grad():
            for name, weight in self._network.named_parameters():
                weight.copy_(own[name])


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}
