"""A backend in one file, without torch inside: a recurrent model in numpy.

Its state after a token is a function of the state before and the token, so it keeps one vector a row and no keys; what
is rolled back is the vector. The tests put this file among those of `blockdraft.targets`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.targets.base import NotCovered, Target, TargetOutput
from blockdraft.types import LoadOptions

RANK = 5
MODEL_TYPE = "toy-recurrent"


class ToyCache(KVCache):
    """Holds the state of each sequence, and the states of the nodes of the last forward pass."""

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity)
        self.states, self.nodes = dict[int, Any](), dict[int, Any]()

    def cut(self, value: int, length: int) -> int:
        raise AssertionError("a state cannot be cut")

    def close(self, start: int) -> None:
        super().close(start)
        self.states.pop(start, None)

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        for start, nodes in zip(self.starts, path, strict=True):
            if len(nodes):
                self.states[start] = self.nodes[start][nodes[-1]]
        super().commit(path)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert list(lengths) == self.lengths, "a state cannot be cut"


class ToyTarget(Target):
    backend = "toy_backend"
    dtype, device = torch.float32, torch.device("cpu")
    num_layers, max_context, can_truncate = 3, 256, False

    def __init__(self, path: Path, seed: int, vocab_size: int, hidden_size: int) -> None:
        self.path, self.vocab_size, self.hidden_size = path, vocab_size, hidden_size
        self.architecture = {"model_type": MODEL_TYPE}
        random = np.random.default_rng(seed)
        self.table = random.normal(size=(vocab_size, hidden_size)).astype(np.float32)
        self.turn = random.normal(size=(hidden_size, hidden_size)).astype(np.float32) * 2 / hidden_size**0.5
        self.out = random.normal(size=(vocab_size, hidden_size)).astype(np.float32)

    def named_weights(self) -> list[tuple[str, Tensor]]:
        return [(name, torch.from_numpy(getattr(self, name))) for name in ("table", "turn", "out")]

    def new_cache(self, batch: int, capacity: int) -> ToyCache:
        return ToyCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        return 4 * batch * self.hidden_size

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 4 * batch * nodes * self.hidden_size

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Any,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        states = np.zeros((*tokens.shape, self.hidden_size), np.float32)
        for place, (start, own, above) in enumerate(zip(cache.starts, tokens.tolist(), parents.tolist(), strict=True)):
            for node, (token, parent) in enumerate(zip(own, above, strict=True)):
                before = states[place, parent] if parent >= 0 else cache.states.get(start)
                before = np.zeros(self.hidden_size, np.float32) if before is None else before
                # One product per node, so that the bits of a node do not depend on its place.
                states[place, node] = np.tanh(self.turn @ before + self.table[token])
            cache.nodes[start] = states[place]
        scored = states if logits_at is None else states[np.arange(len(states)), logits_at.numpy()][:, None]
        hidden_states = np.concatenate([states] * len(target_layers), axis=-1) if target_layers else None
        return TargetOutput(
            self.head(torch.from_numpy(scored)), None if hidden_states is None else torch.from_numpy(hidden_states)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.from_numpy(self.table)[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.hidden_size)
        logits = torch.stack([torch.from_numpy(self.out @ row.numpy()) for row in rows])
        return logits.view(*hidden.shape[:-1], -1)


def load(path: str | Path, options: LoadOptions) -> ToyTarget:
    file = Path(path) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if config.get("model_type") != MODEL_TYPE:
        raise NotCovered(f"it runs {MODEL_TYPE} only")
    return ToyTarget(Path(path), config["seed"], config["vocab_size"], config["hidden_size"])
