"""Quantized weights: their values, and products with quantized inputs."""

import pytest
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import (
    InterleavedWeight,
    NestedFactors,
    QuantizedWeight,
    best_group,
    check_group,
    concatenate_weights,
    quantize_inputs,
)
from blockdraft.nn.quantize_weight import quantize_weight


def weight(bits: int, group: int = 32, offset: bool = False, outputs: int = 21, groups: int = 3) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits + group)
    whole = quantize_weight(torch.randn(outputs, group * groups, generator=generator), bits, group)
    if not offset:
        return whole
    shift = torch.randn(whole.scale.shape, generator=generator)
    return QuantizedWeight(whole.codes + (8 if bits == 4 else 0), whole.scale, shift, bits)


def product_by_hand(x: Tensor, own: QuantizedWeight) -> Tensor:
    """Return the product, computed number by number in float64."""
    out = torch.zeros(len(x), len(own.codes), dtype=torch.float64)
    for n, row in enumerate(x.tolist()):
        for g in range(own.scale.size(1)):
            part = row[g * own.group : (g + 1) * own.group]
            factor = max(map(abs, part)) / 127
            codes = [round(number / factor) if factor else 0 for number in part]
            for o in range(len(own.codes)):
                offset = 0.0 if own.offset is None else float(own.offset[o, g])
                for i, code in enumerate(codes):
                    stands_for = float(own.scale[o, g]) * int(own.codes[o, g * own.group + i]) + offset
                    out[n, o] += factor * code * stands_for
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
def test_products_are_those_of_the_numbers_one_by_one(bits: int, offset: bool) -> None:
    own = weight(bits, 8, offset, outputs=5)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(own.multiply(x).double(), product_by_hand(x, own), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(PackedLinear(own)(x), own.multiply(x), rtol=0, atol=0)


def test_rounding_is_to_the_nearest_of_the_codes() -> None:
    given = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for bits, places in ((4, 8), (8, 127)):
        own = quantize_weight(given, bits, 16)
        assert own.group == 16 and own.shape == given.shape and own.bits == bits
        largest = given.view(9, 4, 16).abs().amax(-1, keepdim=True)
        error = (own.dequantize() - given).view(9, 4, 16).abs()
        # Half a step; or a whole one where 4 bits have 7 in the place of 8, opposite the largest.
        assert (error <= largest / places * (1.01 if bits == 4 else 0.51)).all()
        assert (error.flatten() <= (largest / places * 0.51).expand_as(error).flatten()).float().mean() > 0.98


def test_numbers_out_of_the_range_of_float16_keep_their_scale() -> None:
    for size in (1e-9, 1e6):
        given = size * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        assert float((quantize_weight(given, 8, 32).dequantize() - given).abs().max()) < 0.01 * size * 3
    assert torch.equal(quantize_weight(torch.zeros(2, 32), 4, 32).dequantize(), torch.zeros(2, 32))


def test_a_large_channel_takes_its_precision_from_its_group_alone() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    codes, factor = quantize_inputs(x, 32)
    error = (codes.view(4, 2, 32) * factor[..., None] - x.view(4, 2, 32)).abs().amax((0, 2))
    assert error[1] < 0.02 < error[0]


def test_nan_inputs_spoil_only_their_own_output() -> None:
    own, x = weight(4), torch.randn(4, 96)
    x[1, 40], x[2, 0] = float("nan"), float("inf")
    out = own.multiply(x)
    assert out[[1, 2]].isnan().all() and out[[0, 3]].isfinite().all()
    x[1, 40] = x[2, 0] = 0
    assert torch.equal(own.multiply(x)[[0, 3]], out[[0, 3]])
    assert torch.equal(own.multiply(torch.zeros(1, 96)), torch.zeros(1, 21))


def test_weights_of_different_kinds_are_joined_without_changing_a_number() -> None:
    kinds = [(4, 32, False), (4, 32, True), (8, 16, False), (8, 32, True), (4, 96, False)]
    for one in kinds:
        for other in kinds:
            parts = [weight(*each, groups=96 // each[1]) for each in (one, other)]
            both = concatenate_weights(parts)
            assert both.bits == max(one[0], other[0]) and both.shape == (42, 96)
            torch.testing.assert_close(
                both.dequantize(), torch.cat([part.dequantize() for part in parts]), rtol=1e-6, atol=1e-6
            )
    halves = [QuantizedWeight(each.codes, each.scale, each.scale, 4) for each in (weight(4), weight(4))]
    both, mixed = concatenate_weights(halves), concatenate_weights([halves[0], weight(4, offset=True)])
    assert both.offset is not None and both.offset.dtype == torch.float16
    assert mixed.offset is not None and mixed.offset.dtype == torch.float32
    same = concatenate_weights([weight(4), weight(4)])
    assert same.bits == 4 and same.group == 32 and same.offset is None and same.scale.dtype == torch.float16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("lanes", [4, 16])
def test_what_is_interleaved_can_be_read_back(bits: int, offset: bool, lanes: int) -> None:
    own = weight(bits, offset=offset)
    laid = InterleavedWeight.of(own, lanes)
    assert laid.group == 32 and laid.codes.size(0) == -(-21 // lanes)
    assert laid.codes.numel() == laid.codes.size(0) * lanes * 96 * bits // 8
    assert laid.nbytes == laid.codes.nbytes + laid.scale.nbytes + (laid.offset.nbytes if laid.offset is not None else 0)
    again = laid.weight()
    assert torch.equal(again.codes, own.codes) and torch.equal(again.scale, own.scale)
    assert torch.equal(laid.channels(torch.tensor([20, 3])).dequantize(), own.dequantize()[[20, 3]])
    assert torch.equal(again.dequantize(), own.dequantize())


def nested(group: int, span: int, seed: int = 0, outputs: int = 21, inputs: int = 256) -> NestedFactors:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-128, 128, (outputs, inputs // group), dtype=torch.int8, generator=generator)
    return NestedFactors(numbers, torch.randn(outputs, inputs // group // span, generator=generator).half())


def of_nested(bits: int, group: int, offset: bool) -> QuantizedWeight:
    span = 128 // group
    codes = torch.randint(0, 8, (21, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    return QuantizedWeight(codes, nested(group, span), nested(group, span, 1) if offset else None, bits)


def test_nested_factors_are_whole_numbers_times_units() -> None:
    own = of_nested(4, 16, True)
    assert isinstance(own.scale, NestedFactors) and own.scale.span == 8
    for output, group in ((0, 0), (3, 7), (20, 8), (20, 15)):
        product = int(own.scale.numbers[output, group]) * float(own.scale.unit[output, group // 8])
        assert float(own.scale.float()[output, group]) == product
    assert own.nbytes == 21 * (256 // 2 + 2 * (16 + 2 * 2))
    with pytest.raises(AssertionError, match="of different groups"):
        QuantizedWeight(own.codes, nested(16, 8), nested(16, 4), 4)
    with pytest.raises(AssertionError):
        nested(16, 16 // 3)  # no power of two


@pytest.mark.parametrize(("bits", "offset"), [(4, False), (4, True), (8, True)])
def test_weights_of_nested_factors_are_packed_and_read_back(bits: int, offset: bool) -> None:
    own = of_nested(bits, 16, offset)
    laid = InterleavedWeight.of(own, 16)
    again = InterleavedWeight.of_tensors(laid.tensors(), bits, 21).weight()
    assert isinstance(again.scale, NestedFactors) and (again.offset is None) != offset
    assert torch.equal(again.dequantize(), own.dequantize())
    assert torch.equal(laid.channels(torch.tensor([20, 3])).dequantize(), own.dequantize()[[20, 3]])
    assert laid.nbytes == 32 * (256 * (4 if bits == 4 else 6) // 8 + (1 + offset) * (16 + 2 * 2))


def test_nested_factors_stay_nested_where_weights_are_joined() -> None:
    """As in Q4_K_M, whose queries and keys are in Q4_K, and whose values are in Q6_K without an offset."""
    parts = [of_nested(4, 32, True), of_nested(8, 16, False)]
    both = concatenate_weights(parts)
    assert both.bits == 8 and both.group == 16
    assert isinstance(both.scale, NestedFactors) and isinstance(both.offset, NestedFactors) and both.scale.span == 8
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
    first = of_nested(4, 32, True)
    assert isinstance(concatenate_weights([first, of_nested(4, 64, True)]).scale, NestedFactors)
    of_fewer_groups = QuantizedWeight(first.codes, nested(32, 2), nested(32, 2), 4)
    for other in (weight(4, offset=True, groups=8), of_fewer_groups, of_nested(4, 32, False)):
        both = concatenate_weights([first, other])
        assert isinstance(both.offset, torch.Tensor)
        torch.testing.assert_close(both.dequantize(), torch.cat([first.dequantize(), other.dequantize()]))


def test_groups_that_do_not_fit_are_refused() -> None:
    assert best_group(256) == 128 and best_group(96) == 32 and best_group(24) == 8
    with pytest.raises(
        UsageError, match="A weight of 42 inputs cannot be quantized, because no group of 8 to 128 divides them"
    ):
        best_group(42)
    with pytest.raises(UsageError, match="Groups of 64 do not divide 96 inputs; 32, 16, 8 would"):
        check_group(96, 64)
    with pytest.raises(UsageError, match="group must be a multiple of 8.*, got 12"):
        check_group(96, 12)
    with pytest.raises(UsageError, match="do not divide"):
        quantize_weight(torch.randn(2, 40), 4, 32)


def test_groups_of_which_none_divides_the_other_are_joined() -> None:
    numbers = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    parts = [quantize_weight(numbers, 8, group) for group in (24, 16)]
    joined = concatenate_weights(parts)
    assert joined.group == 8
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_other_dtypes_are_named() -> None:
    codes, scale = torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1, dtype=torch.float16)
    with pytest.raises(AssertionError, match="offset is torch.int32"):
        QuantizedWeight(codes, scale, scale.int(), 4)
    with pytest.raises(AssertionError, match="scale is torch.bfloat16"):
        QuantizedWeight(codes, scale.bfloat16(), None, 4)
