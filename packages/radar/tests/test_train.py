"""Cost of training a drafter, compared with published runs."""

from __future__ import annotations

import pytest

from blockdraft.errors import UsageError
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.shape import read_shape
from blockdraft_radar.train import TrainPlan, train_cost

QWEN = read_shape("qwen3-8b")


@pytest.mark.parametrize(
    ("device", "count", "anchors", "samples_per_second"),
    [
        ("H200 SXM", 8, 256, 50.1),  # Domino's trainer, on 7 of them
        ("H100 SXM", 4, 512, 15.0),  # TorchSpec, with the target on the same devices
    ],
)
def test_published_speeds(device: str, count: int, anchors: int, samples_per_second: float) -> None:
    plan = TrainPlan(tokens=2048, anchors=anchors)
    cost = train_cost(QWEN, machine_of(find(device), count), plan)
    assert cost.samples_per_second == pytest.approx(samples_per_second, rel=0.4)


def test_operations_of_a_sample() -> None:
    """Domino's paper: about 45 TFLOP for 256 blocks of 16."""
    cost = train_cost(QWEN, machine_of(find("H200 SXM")), TrainPlan(samples=1, epochs=1, tokens=3072))
    assert cost.flops == pytest.approx(45e12, rel=0.15)


def test_hidden_states_on_disk() -> None:
    cost = train_cost(QWEN, machine_of(find("H100 SXM")), TrainPlan(samples=10, tokens=100))
    assert cost.hidden_state_bytes == 10 * 100 * 5 * 4096 * 2


def test_more_devices_are_faster() -> None:
    single, eight = (train_cost(QWEN, machine_of(find("H100 SXM"), count), TrainPlan()) for count in (1, 8))
    assert 5 < single.training_hours / eight.training_hours < 8
    assert single.hours == pytest.approx(single.response_hours + single.hidden_state_hours + single.training_hours)
    assert single.fits


def test_target_of_a_trillion_parameters() -> None:
    kimi = read_shape("kimi-k2")
    small = train_cost(kimi, machine_of(find("H100 SXM"), 8), TrainPlan())
    assert not small.fits
    assert 25 < small.devices_needed < 40
    assert train_cost(kimi, machine_of(find("H100 SXM"), 40), TrainPlan()).fits


def test_invalid_plan() -> None:
    with pytest.raises(UsageError, match="epochs must be at least 1"):
        TrainPlan(epochs=0)
