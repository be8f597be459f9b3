"""Noise: masked tokens and their weights."""

import math
from itertools import pairwise

import pytest
import torch

from blockdraft.diffusion.noise import (
    ALL_TIMES,
    SCHEDULES,
    counted_noise,
    intervals,
    steadiest,
    stratified,
    training_noise,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_each_stratum_is_sampled_once_in_random_order() -> None:
    numbers = stratified((16, 64), seeded())
    assert sorted((numbers.flatten() * 1024).ceil().long().tolist()) == list(range(1, 1025))
    # The levels of a sequence cover the whole interval, and are not sorted.
    assert (numbers.std(dim=1) > 0.2).all()
    assert any(a > b for a, b in pairwise(numbers[0].tolist()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    """The rate m rises from 0 to 1, and the weight is m' / m."""
    schedule, t = SCHEDULES[name], torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    assert schedule.rate(torch.ones(1, dtype=torch.float64)).item() == pytest.approx(1)
    assert schedule.rate(torch.full((1,), 1e-9, dtype=torch.float64)).item() == pytest.approx(0, abs=1e-4)
    slope = (schedule.rate(t + 1e-6) - schedule.rate(t - 1e-6)) / 2e-6
    assert torch.allclose(schedule.weight(t), slope / schedule.rate(t), rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("clip", [(0.001, 1.0), (0.3, 0.8), (1.0, 1.0)])
def test_mean_weight_of_a_token(name: str, clip: tuple[float, float]) -> None:
    """The mean weight is the mean slope of m over the sampled times.

    It is 1 over all times, and with the linear schedule over any interval of times.
    """
    eligible = torch.ones(4000, 8, dtype=torch.bool)
    noise = training_noise(eligible, 2, name, clip, seeded())
    low, high = (SCHEDULES[name].rate(torch.tensor(end, dtype=torch.float64)).item() for end in clip)
    expected = (high - low) / (clip[1] - clip[0]) if clip[0] < clip[1] else SCHEDULES[name].weight(torch.ones(1)).item()
    assert noise.weights.mean().item() == pytest.approx(expected, rel=0.06)
    assert torch.equal(noise.weights > 0, noise.masked)
    if clip == (1.0, 1.0):
        assert noise.masked.all()


def test_share_of_masked_tokens_follows_the_interval() -> None:
    noise = training_noise(torch.ones(300, 64, dtype=torch.bool), 64, "linear", (0.45, 0.95), seeded())
    shares = noise.masked.float().mean(dim=1)
    assert shares.min() > 0.45 - 0.25 and shares.mean().item() == pytest.approx(0.7, abs=0.02)
    # Each block has its own time, so sequences of many blocks have similar shares.
    many = training_noise(torch.ones(300, 64, dtype=torch.bool), 1, "linear", (0.45, 0.95), seeded())
    assert many.masked.float().mean(dim=1).std() < shares.std() / 2


def test_complementary_masks_cover_each_token_once() -> None:
    eligible = torch.rand(50, 12, generator=seeded()) < 0.7
    noise = training_noise(eligible, 4, "linear", (0.2, 0.9), seeded(), complementary=True)
    mask, complement = noise.masked.chunk(2)
    assert torch.equal(mask ^ complement, eligible) and not (mask & complement).any()
    mask_weight, complement_weight = noise.weights.chunk(2)
    t = (1 / mask_weight[mask]).median()
    assert 0.2 <= t <= 0.9
    # Both masks of a block share its time: the weights are 1 / t and 1 / (1 - t).
    for row in range(50):
        for begin in range(0, 12, 4):
            first = mask_weight[row, begin : begin + 4].max().item()
            second = complement_weight[row, begin : begin + 4].max().item()
            if first and second:
                assert 1 / first + 1 / second == pytest.approx(1, rel=1e-5)
    all_masked = training_noise(eligible, 4, "linear", (1.0, 1.0), seeded(), complementary=True)
    assert all_masked.weights.isfinite().all() and not all_masked.masked[50:].any()


def test_counted_noise() -> None:
    """All numbers of masked tokens are equally likely, and the mean weight of each token is 1."""
    eligible = torch.ones(3000, 7, dtype=torch.bool)
    eligible[:, 0] = False  # the blocks have 3 eligible tokens each
    noise = counted_noise(eligible, 4, seeded())
    assert not noise.masked[:, 0].any()
    assert torch.equal(noise.weights > 0, noise.masked)
    for begin, num_eligible in ((0, 3), (4, 3)):
        counts = noise.masked[:, begin : begin + 4].sum(dim=1)
        assert counts.bincount().tolist() == pytest.approx([0] + [3000 / num_eligible] * num_eligible, abs=150)
        weights = noise.weights[:, begin : begin + 4].sum(dim=1)
        assert torch.allclose(weights, torch.tensor(float(num_eligible)))
    assert torch.allclose(noise.weights.mean(dim=0)[1:], torch.ones(6), atol=0.06)


def test_blocks_of_one_token_are_always_masked() -> None:
    eligible = torch.tensor([[False, True, True, True]])
    noise = counted_noise(eligible, 1, seeded())
    assert torch.equal(noise.masked, eligible) and noise.weights.tolist() == [[0, 1, 1, 1]]


def test_same_seed_same_noise() -> None:
    eligible = torch.ones(4, 8, dtype=torch.bool)
    noise, same, other = (training_noise(eligible, 4, "cosine", (0.001, 1.0), seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(noise.weights, same.weights) and not torch.equal(noise.weights, other.weights)
    assert math.isfinite(noise.weights.sum())


def test_grid_of_intervals() -> None:
    grid = intervals()
    assert grid[0] == ALL_TIMES and len(grid) == len({*grid}) == 1 + 11 + 9 + 7 + 5 + 3
    assert {(0.45, 0.95), (0.3, 0.8), (0.001, 0.5), (0.1, 1.0)} < {*grid}
    assert all(0 < low < high <= 1 for low, high in grid)


def test_steadiest_interval() -> None:
    """The losses vary outside 0.3 to 0.8, and hardly within."""
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(4000, generator=generator, dtype=torch.float64)
    noise = torch.randn(4000, generator=generator, dtype=torch.float64)
    is_steady = (times > 0.3) & (times < 0.8)
    assert steadiest(times, 1 + noise * torch.where(is_steady, 0.1, 3.0)) == (0.3, 0.8)
    # Only the variance counts, not the mean.
    assert steadiest(times, torch.where(is_steady, 9.0, 0.0) + noise * torch.where(is_steady, 0.1, 3.0)) == (0.3, 0.8)


def test_intervals_with_too_few_blocks_are_ignored() -> None:
    assert steadiest(torch.linspace(0.1, 0.9, 5), torch.zeros(5)) == ALL_TIMES
