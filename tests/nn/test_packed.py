"""Packed products against `F.linear` in float64."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.library import Library
from blockdraft.nn.packed import PackedLinear, fits_bfloat16
from blockdraft.nn.quantization import InterleavedWeight

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 32)
SHAPES = ((1, 1), (3, 5), (16, 8), (33, 40), (224, 17), (7, 130))  # inputs, outputs
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def library(dtype: torch.dtype) -> Library:
    actual = build(dtype, dtype, inputs=dtype).library()
    assert actual is not None
    return actual


def linear(dtype: torch.dtype, inputs: int, outputs: int, bias: bool = True) -> PackedLinear:
    torch.manual_seed(inputs + outputs)
    return PackedLinear(torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs, dtype=dtype) if bias else None)


def exact(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("inputs", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 41])
def test_inputs_are_rounded_to_what_the_library_is_for(inputs: torch.dtype, size: int) -> None:
    actual = build(torch.bfloat16, torch.bfloat16, inputs=inputs).library()
    assert actual is not None
    layer, out = linear(torch.bfloat16, size, 33), torch.empty(11, 33)
    x = torch.randn(11, size)
    # Two ties, which go to the even number; a number that becomes infinite; and a NaN that cutting would make infinite.
    x[:4, -1] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38 if inputs == torch.bfloat16 else 1.0, 0.0])
    x[3, -1:].view(torch.int32).fill_(0x7F800001)
    actual.multiply(actual.linear(layer), x, out)
    right = exact(layer, x.to(inputs))
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert out[3].isnan().all() and not out[:2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_products_are_right_for_all_shapes(dtype: torch.dtype, packed: bool) -> None:
    for (inputs, outputs), bias in product(SHAPES, (True, False)):
        layer = linear(dtype, inputs, outputs, bias)
        if packed:
            layer.pack(library(dtype))
        for rows in ROWS:
            x = torch.randn(rows, inputs, dtype=dtype)
            out, right = layer(x), exact(layer, x)
            assert out.dtype == x.dtype and out.shape == (rows, outputs)
            torch.testing.assert_close(out.double(), right, rtol=0, atol=DTYPES[dtype] * (1 + right.abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        layer = linear(dtype, inputs, outputs)
        layer.pack(library(dtype))
        x = torch.randn(max(ROWS), inputs)
        alone = torch.cat([layer(row) for row in x.split(1)])
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), alone[:rows]), (inputs, outputs, rows)


def test_numbers_that_bfloat16_holds_are_kept_in_it_and_give_the_same_bits() -> None:
    weight = torch.randn(40, 33).bfloat16().float()
    assert fits_bfloat16(weight) and not fits_bfloat16(weight + 1e-4)
    whole, halved = PackedLinear(weight.clone()), PackedLinear(weight.clone())
    whole.pack(library(torch.float32))
    halved.pack(build(torch.bfloat16, torch.float32).library())  # type: ignore[arg-type]
    assert halved.stored.dtype == torch.bfloat16 and halved.weight.dtype == torch.float32
    assert torch.equal(halved.weight, weight)
    x, index = torch.randn(7, 33), torch.tensor([0, 17, 39])
    assert torch.equal(halved(x), whole(x)) and halved(x).dtype == torch.float32
    assert torch.equal(halved.lookup(index), whole.lookup(index))


class TorchKernels:
    """Kernels that implement the protocol in torch."""

    lanes, weights_dtype = 4, torch.float32

    def product(
        self, weight: Tensor | InterleavedWeight, bias: Tensor | None, inputs: int, outputs: int
    ) -> Callable[[Tensor, Tensor], None]:
        assert isinstance(weight, Tensor) and weight.shape == (-(-outputs // 4), inputs, 4) and bias is not None
        plain, added = weight.transpose(1, 2).reshape(-1, inputs)[:outputs], bias[:outputs]
        return lambda rows, out: out.view(-1, outputs).copy_(rows @ plain.T + added)  # type: ignore[return-value]


def test_any_kernels_will_do_but_one_at_a_time() -> None:
    layer, x = linear(torch.float32, 33, 41), torch.randn(2, 3, 33)
    right, weight = layer(x), layer.weight.clone()
    layer.pack(kernels := TorchKernels())
    torch.testing.assert_close(layer(x), right)
    assert torch.equal(layer.weight, weight) and torch.equal(layer.lookup(torch.tensor([40])), weight[40:])
    layer.pack(kernels)
    with pytest.raises(AssertionError, match="other kernels"):
        layer.pack(TorchKernels())
    with pytest.raises(UsageError, match="Token id 41 is none of the 41 .* use the tokenizer"):
        layer.lookup(torch.tensor([[0, 41]]))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int, set_threads: Callable[[int], None]) -> None:
    layer = linear(torch.float32, 33, 40)
    layer.pack(library(torch.float32))
    x = torch.randn(7, 33)
    set_threads(1)
    single = layer(x)
    set_threads(threads)
    assert torch.equal(layer(x), single)


def test_inputs_may_have_any_shape_and_strides() -> None:
    layer = linear(torch.float32, 33, 40)
    layer.pack(library(torch.float32))
    for x in (
        torch.randn(33),
        torch.randn(2, 3, 33),
        torch.randn(33, 5).T,
        torch.randn(4, 66)[:, ::2],
        torch.empty(0, 33),
    ):
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=0, atol=1e-4)
    torch.testing.assert_close(layer(torch.randn(6, 99)[::2, 33:66]).shape, torch.Size([3, 40]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_kept_once_and_can_be_read_back(dtype: torch.dtype) -> None:
    layer = linear(dtype, 17, 21)
    weight = layer.weight.clone()
    rows = layer.lookup(torch.tensor([[0, 20], [7, 7]]))
    layer.pack(library(dtype))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.lookup(torch.tensor([[0, 20], [7, 7]])), rows)
    held = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers() if buffer.dim() > 1)
    assert held <= 17 * 32 * dtype.itemsize  # the outputs filled up to whole blocks


def test_gradients_reach_the_inputs() -> None:
    layer = linear(torch.float32, 17, 21)
    layer.pack(library(torch.float32))
    x = torch.randn(3, 17, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand(3, -1))
