"""GPTQ against its definition."""

from math import inf

import pytest
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantize_weight import Grid, best_grid, quantize_weight
from blockdraft_tools.quantize.gptq import DAMPING, quantize_weight_gptq


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
            quantize_weight_gptq(weight, torch.eye(16), bits, 8, zero_points)


@pytest.mark.parametrize("number", [float("nan"), inf])
def test_inputs_that_are_not_finite_are_refused(number: float) -> None:
    moments = torch.eye(16)
    moments[2, 3] = moments[3, 2] = number
    with pytest.raises(UsageError, match="computes NaN or infinity for the text"):
        quantize_weight_gptq(torch.ones(3, 16), moments, 4, 8)


def test_a_text_that_says_nothing() -> None:
    weight = torch.zeros(2, 16)
    weight[0] = 1e7  # float16 has no place for it
    assert quantize_weight_gptq(weight, torch.zeros(16, 16), 8, 8).dequantize().isfinite().all()


def test_a_group_must_divide_the_rows() -> None:
    with pytest.raises(ValueError, match="Groups of 32 do not divide 48 inputs"):
        quantize_weight_gptq(drawn(2, 48), torch.eye(48), 4, 32)
