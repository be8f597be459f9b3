"""Which times training draws from."""

import torch

from blockdraft.diffusion.intervals import ALL_TIMES, intervals, steadiest


def test_the_grid() -> None:
    found = intervals()
    assert found[0] == ALL_TIMES and len(found) == len({*found}) == 1 + 11 + 9 + 7 + 5 + 3
    assert (0.45, 0.95) in found and (0.3, 0.8) in found and (0.001, 0.5) in found and (0.1, 1.0) in found
    assert all(0 < low < high <= 1 for low, high in found)


def test_the_steadiest_interval() -> None:
    """Losses that vary outside of 0.3 to 0.8, and hardly within."""
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(4000, generator=generator, dtype=torch.float64)
    noise = torch.randn(4000, generator=generator, dtype=torch.float64)
    is_steady = (times > 0.3) & (times < 0.8)
    assert steadiest(times, 1 + noise * torch.where(is_steady, 0.1, 3.0)) == (0.3, 0.8)
    # The variance decides, not how large the losses are.
    assert steadiest(times, torch.where(is_steady, 9.0, 0.0) + noise * torch.where(is_steady, 0.1, 3.0)) == (0.3, 0.8)


def test_too_few_blocks_say_nothing() -> None:
    assert steadiest(torch.linspace(0.1, 0.9, 5), torch.zeros(5)) == ALL_TIMES
