"""Triton's product with quantized weights, in its interpreter: on a CPU, with numpy."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from blockdraft.kernels.cuda.compiler import compiled
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import NestedFactors, QuantizedWeight

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs them, which Triton reads when torch loads it", allow_module_level=True)
from blockdraft.kernels.cuda.quantized_product import MAX_ROWS, PackedCodes, fits

KINDS = {  # bits, whether there is an offset, group, whether factors are nested
    "q4_0": (4, False, 32, False),
    "q4_1": (4, True, 32, False),
    "q4_k": (4, True, 32, True),
    "q6_k": (8, False, 16, True),
    "q8_0": (8, False, 32, False),
    "groups of 128": (4, False, 128, False),
}


def weight_of(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    bits, shifted, group, nested = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    low, high = ((0, 16) if shifted else (-8, 8)) if bits == 4 else ((-32, 32) if nested else (-127, 128))

    def factors() -> Tensor | NestedFactors:
        groups = inputs // group
        if not nested:
            return (torch.rand(outputs, groups, generator=generator) / 20).half()
        numbers = torch.randint(1, 64, (outputs, groups), generator=generator).to(torch.int8)
        return NestedFactors(numbers, (torch.rand(outputs, inputs // 256, generator=generator) / 500).half())

    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    return QuantizedWeight(codes, factors(), factors() if shifted else None, bits)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_weight(kind: str) -> None:
    weight = weight_of(kind, 45, 512)  # the last program has columns that are not there
    packed = PackedCodes.of(weight)
    assert fits(weight) and packed.shape == weight.shape and packed.nbytes < 45 * 512 * 9 / 8 + 1
    factors_rounded = {"atol": 0.004, "rtol": 2**-10} if "k" in kind else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(packed.dequantize(), weight.dequantize(), **factors_rounded)
    rows = torch.tensor([44, 0, 7])
    assert torch.equal(packed.channels(rows).dequantize(), packed.dequantize()[rows])
    for count in (1, 3, 16, 17, MAX_ROWS, MAX_ROWS + 1):
        wide = torch.randn(count, 600, generator=torch.Generator().manual_seed(count))
        x = wide[:, :512]  # rows need not touch
        expected = x @ packed.dequantize().T
        torch.testing.assert_close(packed.multiply(x), expected, atol=1e-3, rtol=1e-4)
        halved = packed.multiply(x.half())
        assert halved.dtype == torch.float16
        torch.testing.assert_close(halved.float(), expected, atol=0.2, rtol=0.02)


def test_what_the_kernel_does_not_know() -> None:
    odd = QuantizedWeight(torch.zeros(8, 96, dtype=torch.int8), torch.ones(8, 3), None, 4)  # three groups
    small = QuantizedWeight(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 8), None, 8)  # groups of 8
    floating = QuantizedWeight(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 2), None, 4, floating=True)
    assert not any(map(fits, (odd, small, floating)))


def test_a_layer_multiplies_looks_up_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.nn.packed.check_tokens", None)  # a check would wait for the GPU
    packed, bias = PackedCodes.of(weight_of("q4_0", 40, 128)), torch.randn(40)
    layer = PackedLinear(packed, bias)
    assert (layer.out_features, layer.in_features, layer.bits) == (40, 128, 4)
    assert layer.nbytes == packed.nbytes + bias.nbytes
    x, dense = torch.randn(2, 3, 128), packed.dequantize()
    torch.testing.assert_close(layer(x), x @ dense.T + bias, atol=1e-3, rtol=1e-4)
    assert torch.equal(layer.weight, dense)
    assert torch.equal(layer.lookup(torch.tensor([[3, 39]])), dense[[3, 39]][None])


@torch.no_grad()
def test_torch_compile_keeps_it_in_one_graph(constants: Callable[..., None]) -> None:
    layer = PackedLinear(PackedCodes.of(weight_of("q4_k", 40, 256)), torch.randn(40))
    constants("blockdraft.kernels.cuda.compiler", BACKEND="aot_eager")  # no C++ to compile
    torch.compiler.reset()
    counters.clear()
    run = compiled(lambda x: layer(x.cos()) + 1, {0: (0,)})
    for count in (5, 3, MAX_ROWS + 1):
        x = torch.randn(count, 256)
        torch.testing.assert_close(run(x), layer(x.cos()) + 1, atol=1e-3, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1, "each number of rows is compiled apart"
