"""Checkpoints are whole or absent, and restore weights and optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockdraft_train import checkpoints
from blockdraft_train.checkpoints import gather_state, gather_weights, restore_state


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        checkpoints.save(tmp_path, step, {"step": step, "weights": torch.ones(2)}, keep=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000010.pt", "step-00000015.pt"]
    state = checkpoints.newest(tmp_path)
    assert state is not None and state["step"] == 15


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_full_disk_leaves_the_old_one(kind: type[Exception], tmp_path: Path) -> None:
    class Full:
        def __reduce__(self) -> Any:
            raise kind("No space left on device")

    checkpoints.save(tmp_path, 5, {"step": 5}, keep=1)
    with pytest.raises(ValueError, match=r"No space left.*newest checkpoint is step-00000005.pt; free disk space"):
        checkpoints.save(tmp_path, 10, {"step": 10, "weights": Full()}, keep=1)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000005.pt"]


def test_what_was_cut_short_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5, {"step": 5}, keep=1)
    (tmp_path / "step-00000010.partial").write_bytes(b"half of it")
    state = checkpoints.newest(tmp_path)
    assert state is not None and state["step"] == 5


def test_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-00000010.pt").write_bytes(b"nonsense")
    with pytest.raises(
        ValueError, match=r"step-00000010.pt cannot be read .* delete it to resume from the checkpoint b"
    ):
        checkpoints.newest(tmp_path)


def test_there_may_be_none(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "absent") is None


def test_what_follows_an_interruption(tmp_path: Path) -> None:
    assert "before the first checkpoint" in checkpoints.after_interruption(tmp_path / "checkpoints")
    checkpoints.save(tmp_path / "checkpoints", 20, {"step": 20}, keep=1)
    assert "resumes from step 20, the newest" in checkpoints.after_interruption(tmp_path / "checkpoints")


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
        states.append(gather_state(module, optimizers))
    restore_state(module, optimizers, {**states[0], "step": 1})
    for state in states[1:]:
        stepped(module, *optimizers[:1])
        stepped(module, *optimizers[1:])
        state = gather_state(module, optimizers)
        for name, weight in state["network"].items():
            assert torch.equal(state["network"][name], weight)
            assert torch.equal(gather_weights(module)[name], weight)
