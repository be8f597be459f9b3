"""A pretended GPU refuses what a GPU refuses; on it a step waits as often as on a GPU, and graphs are replayed.

Whole engines run on it with every drafter in tests/drafters/test_lossless.py, and every family of targets in
tests/targets/test_families_on_gpu.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from captured_forwards import Recorder
from pretended_gpu import GPU, OnGPU, pretended_gpu
from thinned import LONG
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.targets import load_target
from blockdraft.targets.native import NativeTarget
from blockdraft.types import SamplingParams


def test_it_refuses_what_a_gpu_refuses() -> None:
    with pretended_gpu() as waits:
        there, here = torch.arange(4, device=GPU), torch.arange(4)
        assert isinstance(there, OnGPU) and there.device == GPU and (there + torch.tensor(2)).device == GPU
        mixes: list[Callable[[], Tensor]] = [
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: torch.where(there > 1, there, here),
        ]
        for mix in mixes:
            with pytest.raises(RuntimeError, match="device"):
                mix()
        assert waits == []
        assert (there + 1).tolist() == [1, 2, 3, 4] and int(there[2]) == 2 and len(there.nonzero()) == 3
        there[1], there[2:] = 5, here[:2].to(GPU)
        assert there.cpu().tolist() == [0, 5, 0, 1]
        here.pin_memory().to(GPU, non_blocking=True)
        names = [each.split(".")[1] for each in waits]
        assert names == ["_to_copy", "_local_scalar_dense", "nonzero", "_to_copy", "_to_copy"]


@pytest.mark.parametrize(
    ("capture", "budget", "waits"),
    [
        (True, 0, 1),
        pytest.param(True, 11, 2, marks=LONG),
        pytest.param(False, 0, 1, marks=LONG),
        pytest.param(False, 11, 2, marks=pytest.mark.slow),
    ],
)
def test_how_often_a_greedy_step_waits(
    tiny_target_dir: Path, tiny_drafter_dir: Path, capture: bool, budget: int, waits: int
) -> None:
    """The numbers are those of test_graphs.py, which counts on a GPU."""
    with pretended_gpu() as actual:
        target = load_target(tiny_target_dir, dtype="float32", device=GPU, backend="native", compile="off")
        recorder = Recorder()
        if capture:
            assert isinstance(target, NativeTarget)
            target.capture(recorder)
        drafter = load_drafter(tiny_drafter_dir, target=target)
        runner, rows = Probe(target, drafter).open_sequences(1, 3, 64)
        plan = ChainPlan(drafter.block_size, [SamplingParams()]).as_tree(budget)
        for _ in range(3):
            runner.step(rows, plan)
        actual.clear()
        captures, replays = recorder.captures, recorder.replays
        runner.step(rows, plan)
    assert len(actual) == waits, actual
    assert recorder.captures == captures and recorder.replays == replays + 2 * capture
