"""Quantization of weights, against readable twins."""

from math import inf

import pytest
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import PIECE
from blockdraft.nn.quantize_weight import DAMPING, SHRUNK, Grid, best_grid, quantize_weight, quantize_weight_gptq


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
    moments = torch.zeros(16, 16)  # of a text that says nothing
    assert quantize_weight_gptq(weight, moments, 8, 8).dequantize().isfinite().all()


def one_by_one(weight: Tensor, moments: Tensor, grid: Grid, group: int) -> Tensor:
    """Quantize by GPTQ's definition: round one input, correct the remaining ones for the least error, repeat."""
    left, out, moments = weight.double().clone(), torch.empty_like(weight), moments.double().clone()
    moments += torch.eye(len(moments)) * DAMPING * moments.diagonal().mean()
    remaining = list(range(weight.size(1)))
    for at in moments.diagonal().argsort(descending=True).tolist():
        inverse = torch.linalg.inv(moments[remaining][:, remaining])
        place = remaining.index(at)
        own = grid.column(at // group)
        out[:, at] = own.values(own.codes(left[:, at, None, None].float()))[:, 0, 0]
        error = (left[:, at] - out[:, at]) / inverse[place, place]
        left[:, remaining] -= torch.outer(error, inverse[place])
        remaining.remove(at)
    return out


def test_compensation_is_that_of_the_definition() -> None:
    inputs, group = 160, 32  # more than one block
    weight, x = drawn(5, inputs), drawn(400, 40, seed=1) @ drawn(40, inputs, seed=2) + 0.3 * drawn(400, inputs, seed=3)
    moments = x.T @ x
    actual = quantize_weight_gptq(weight, moments, 4, group).dequantize()
    damped = moments.diagonal() + DAMPING * moments.diagonal().mean()
    grid = best_grid(weight.unflatten(1, (-1, group)), 4, damped.view(-1, group))
    expected = one_by_one(weight, moments, grid, group)
    assert (actual != expected).float().mean() < 0.1  # near a border between codes, and then all that follows it
    losses = [
        ((x @ (one - weight).T) ** 2).sum()
        for one in (actual, expected, quantize_weight(weight, 4, group).dequantize())
    ]
    assert abs(losses[0] / losses[1] - 1) < 0.05 and losses[0] < 0.5 * losses[2]


def test_inputs_that_do_not_go_together_make_up_for_nothing() -> None:
    weight = drawn(4, 64)
    assert torch.equal(quantize_weight_gptq(weight, torch.eye(64), 4, 32).codes, quantize_weight(weight, 4, 32).codes)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("number", [float("nan"), inf, -inf])
def test_numbers_without_a_scale_are_refused(number: float, zero_points: bool) -> None:
    weight = torch.ones(3, 16)
    weight[1, 3] = number
    for bits in (4, 8):
        with pytest.raises(UsageError, match="holds NaN or infinity"):
            quantize_weight(weight, bits, 8, zero_points)
        with pytest.raises(UsageError, match="holds NaN or infinity"):
            quantize_weight_gptq(weight, torch.eye(16), bits, 8, zero_points)


def test_a_group_must_divide_the_rows() -> None:
    with pytest.raises(ValueError, match="Groups of 32 do not divide 48 inputs; 16, 8 would"):
        quantize_weight(drawn(2, 48), 4, 32)
    with pytest.raises(ValueError, match="Groups of 32 do not divide 48 inputs"):
        quantize_weight_gptq(drawn(2, 48), torch.eye(48), 4, 32)
