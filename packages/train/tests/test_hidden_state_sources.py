"""Features that stay on a GPU: computed once as far as there is room, and always those of the target."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockdraft_train import hidden_state_sources
from blockdraft_train.hidden_state_sources import StoredHiddenStates, open_source
from blockdraft_train.progress import Progress


def test_what_finds_room_is_computed_once() -> None:
    asked: list[list[int]] = []

    def source(chosen: Sequence[int]) -> list[Tensor]:
        asked.append(list(chosen))
        return [torch.full((2, 3), float(i)) for i in chosen]

    stored = StoredHiddenStates(source, room=3 * 2 * 3 * 4)  # three documents
    for chosen in ([4, 1], [1, 2, 4], [3, 2, 1], [3, 4]):
        assert [int(hidden[0, 0]) for hidden in stored(chosen)] == chosen
    assert asked == [[4, 1], [2], [3], [3]]


def test_features_in_memory_stay_on_a_gpu(monkeypatch: Any) -> None:
    notes: list[str] = []
    target: Any = SimpleNamespace(device=torch.device("cuda:0"))
    monkeypatch.setattr(hidden_state_sources, "free_bytes", lambda device: 2**31)
    monkeypatch.setattr(
        hidden_state_sources,
        "target_hidden_states",
        lambda target, target_layers, tokens: [hidden * 2 for hidden in tokens],
    )
    documents: Any = [SimpleNamespace(tokens=torch.tensor([i])) for i in range(3)]
    given: Any = {"target_layers": (1,), "beside": None, "reserved": None, "progress": Progress(note=notes.append)}
    source = open_source("memory", target, None, documents, **given)  # type: ignore[arg-type]
    assert [int(hidden) for hidden in source([2, 1])] == [4, 2] and isinstance(source, StoredHiddenStates)
    assert notes == ["The target's hidden states stay on cuda:0 once computed, up to 1.0 GiB."]
