"""Logits of the nodes of a draft tree, from any runner of a network whose entries are pairs."""

from typing import Any

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import LayeredNetwork
from blockdraft.nn.foreign_tensor import in_torch


def target_layers(network: LayeredNetwork, rows: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, 32 * len(network.config.target_layers), generator=generator)


def two_texts(run: Any, network: LayeredNetwork) -> KVCache:
    """Return the state of two sequences of different lengths at any KV slots, one of them read in two parts."""
    state = run.new_state(2, 150)
    for row in (0, 150):
        state.close(row)
    for row, capacity in ((160, 60), (3, 70)):
        state.open(row, capacity)
    state = state.of([160, 3])
    tokens = torch.arange(60).view(2, 30) * 7 % 265
    run.observe(state, tokens[:, :21], target_layers(network, 2, 21, 0))
    state.commit([range(20), range(6)])
    run.observe(state, tokens[:, 21:], target_layers(network, 2, 9, 1))
    state.commit([range(9), range(2)])
    return state


@torch.no_grad()
def logits_of(run: Any, network: LayeredNetwork, window: int | None = None) -> list[Tensor]:
    """Return the logits of six levels after two sequences."""
    state = two_texts(run, network)
    nodes = run.nodes(state, 8, 3, window)
    actual = [nodes(torch.tensor([[40], [41]]))]
    actual.append(nodes(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(2, 3, dtype=torch.int64)))
    actual.append(nodes(torch.tensor([[7, 8, 9], [10, 11, 12]]), torch.tensor([[2, 0, 2], [1, 1, 0]])))
    actual.append(nodes(torch.tensor([[9, 8], [9, 8]]), torch.tensor([[2, 1], [0, 2]])))
    actual.append(nodes(torch.tensor([[3], [3]]), torch.tensor([[1], [0]])))
    actual.append(nodes(torch.tensor([[4], [5]])))
    return [in_torch(logits) for logits in actual]
