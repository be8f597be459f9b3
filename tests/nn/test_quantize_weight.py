"""Quantization of weights, against readable twins."""

from math import inf

import pytest
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import PIECE
from blockdraft.nn.quantize_weight import SHRUNK, best_grid, quantize_weight


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def half(number: float) -> float:
    return float(torch.tensor(number).half())


def nearest(numbers: list[float], scale: float, zero: int, least: int, most: int) -> list[float]:
    """Return the nearest values of a grid."""
    codes = [min(max(round(number / scale + zero), least), most) for number in numbers]
    return [(code - zero) * scale for code in codes]


def least_error(numbers: list[float], importance: list[float], zero_points: bool) -> float:
    """Return the squared error of the best grid of 4 bits, by trying all."""
    best = inf
    for share in SHRUNK:
        if zero_points:
            low, high = share * min(*numbers, 0.0), share * max(*numbers, 0.0)
            scale = half((high - low) / 15)
            tried = [(scale, min(max(round(-low / scale), 0), 15), 0, 15)]
        else:
            largest = max(numbers, key=abs)
            tried = [(half(share * largest / end), 0, -8, 7) for end in (-8, 7)]
        for scale, zero, least, most in tried:
            actual = nearest(numbers, scale, zero, least, most)
            errors = zip(actual, numbers, importance, strict=True)
            best = min(best, sum(weight * (one - number) ** 2 for one, number, weight in errors))
    return best


@pytest.mark.parametrize("zero_points", [False, True])
def test_the_grid_of_each_group_has_the_least_error(zero_points: bool) -> None:
    parts = drawn(3, 2, 8) + 0.7
    importance = drawn(2, 8, seed=1).abs()
    grid = best_grid(parts, 4, importance, zero_points)
    errors = ((grid.values(grid.codes(parts)) - parts) ** 2 * importance).sum(-1)
    expected = [
        [least_error(parts[row, at].tolist(), importance[at].tolist(), zero_points) for at in range(2)]
        for row in range(3)
    ]
    torch.testing.assert_close(errors, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert torch.equal(grid.scale, grid.scale.half().float())


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_that_of_its_grid(bits: int, zero_points: bool) -> None:
    weight = drawn(6, 64) + 0.5
    actual = quantize_weight(weight, bits, 32, zero_points)
    assert (actual.bits, actual.group, actual.offset is None) == (bits, 32, not zero_points)
    parts = weight.unflatten(1, (-1, 32))
    grid = best_grid(parts, bits, None, zero_points)
    torch.testing.assert_close(actual.dequantize(), grid.values(grid.codes(parts)).flatten(1), rtol=1e-5, atol=1e-5)
    assert (actual.dequantize() - weight).abs().max() < {4: 0.6, 8: 0.02}[bits]
    assert not zero_points or (actual.offset / actual.scale.float()).frac().abs().max() < 0.01  # zeros are whole


def test_zero_points_help_where_numbers_lie_on_one_side() -> None:
    weight = drawn(4, 32).abs()
    errors = [
        (quantize_weight(weight, 4, 32, zero_points).dequantize() - weight).square().sum()
        for zero_points in (True, False)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_many_channels_are_quantized_in_pieces() -> None:
    weight = drawn(2 * PIECE // 64 + 3, 64)
    actual = quantize_weight(weight, 8, 64)
    for row in (0, PIECE // 64 - 1, PIECE // 64, len(weight) - 1):
        assert torch.equal(actual.dequantize()[row], quantize_weight(weight[row : row + 1], 8, 64).dequantize()[0])


def test_zeros_and_numbers_that_float16_has_no_place_for() -> None:
    weight = torch.zeros(2, 16)
    assert (
        not quantize_weight(weight, 4, 8).dequantize().any()
        and not quantize_weight(weight, 4, 8, True).dequantize().any()
    )
    weight[0] = 1e7
    torch.testing.assert_close(quantize_weight(weight, 8, 8).dequantize(), weight, rtol=1e-5, atol=0)
    assert quantize_weight(weight, 8, 8).scale.dtype == torch.float32


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("number", [float("nan"), inf, -inf])
def test_numbers_without_a_scale_are_refused(number: float, zero_points: bool) -> None:
    weight = torch.ones(3, 16)
    weight[1, 3] = number
    for bits in (4, 8):
        with pytest.raises(UsageError, match="holds NaN or infinity"):
            quantize_weight(weight, bits, 8, zero_points)


def test_a_group_must_divide_the_rows() -> None:
    with pytest.raises(ValueError, match="Groups of 32 do not divide 48 inputs; 16, 8 would"):
        quantize_weight(drawn(2, 48), 4, 32)
