"""Products in bfloat16: the bits of every processor that this one can run, and of a readable twin."""

import shutil
import subprocess
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.sources import PARALLEL, VECTORS, command
from blockdraft.machine import processor_flags
from blockdraft.nn.packed import PackedLinear, pack_weights

# gcc's options, what their kernels use, and flags of the processors that run them.
WAYS = {
    "AMX": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ("avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
    "vdpbf16ps": (("-march=x86-64-v4", "-mavx512bf16"), ("avx512bw", "avx512_bf16")),
    "AVX-512": (("-march=x86-64-v4",), ("avx512bw", "avx512vl")),
    "AVX2": (("-march=x86-64-v3",), ("avx2", "fma")),
    "AVX2, 4 lanes": (("-march=x86-64-v3", "-DMAX_LANES=4"), ("avx2", "fma")),
}
SHAPES = [(1, 5), (2, 16), (3, 17), (31, 16), (32, 1), (32, 16), (33, 40), (64, 149), (70, 33), (96, 48), (130, 20)]
ROWS = (1, 2, 7, 8, 16, 17, 33, 64, 70)
needs_gcc = pytest.mark.skipif("fma" not in processor_flags() or shutil.which("gcc") is None, reason="no FMA or gcc")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    folder, made = tmp_path_factory.mktemp("libraries"), dict[str, Library]()
    for name, (options, needed) in WAYS.items():
        if {*needed} <= processor_flags():
            lanes = () if any("MAX_LANES" in option for option in options) else ("-DMAX_LANES=16",)
            defines = ["-DWEIGHT=1", "-DNARROW=1", "-DSTORE=1", "-DINTEGERS=0", *lanes]
            out = folder / f"{len(made)}.so"
            options = (*options, *VECTORS, *PARALLEL, "-O0")  # compiles in a quarter of the time
            subprocess.run(command("gcc", out, *options, *defines), check=True)
            made[name] = Library(out)
    return made


def layers() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield weights, biases and inputs."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
        x = torch.randn(max(ROWS), inputs, generator=generator)
        x[3] *= 1e6
        yield weight, torch.randn(outputs, generator=generator), x


def product(library: Library, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    layer = PackedLinear(pack_weights([weight], library), bias)
    layer.dtype = torch.bfloat16
    out = torch.full((len(x), len(weight)), torch.nan)
    library.multiply(library.linear(layer), x.contiguous(), out)
    return out


def twin(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Sums in the order of AMX: of each 32 inputs those at even and those at odd places, and both to what was before. A
    product of two numbers in bfloat16 is exact in float64, and so is its sum with a float32 before it is rounded, but
    for sums of very different size, where rounding twice is seldom another number."""
    w, given = weight.double().numpy(), x.bfloat16().double().numpy()
    totals = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, weight.size(1), 32):
        parts = [np.zeros_like(totals), np.zeros_like(totals)]
        for i in range(begin, min(begin + 32, weight.size(1))):
            parts[i % 2] = (parts[i % 2] + given[:, i, None] * w[None, :, i]).astype(np.float32)
        totals = totals + (parts[0] + parts[1])
    return torch.from_numpy(totals + bias.numpy())


@needs_gcc
def test_sums_run_in_the_order_of_amx(libraries: dict[str, Library]) -> None:
    for weight, bias, x in layers():
        expected = twin(weight, bias, x)
        for library in libraries.values():
            assert (product(library, weight, bias, x) == expected).float().mean() > 0.999


@needs_gcc
@pytest.mark.parametrize("threads", [1, 3])
def test_all_instructions_compute_the_same_bits_for_any_rows(
    libraries: dict[str, Library], threads: int, set_threads: Callable[[int], None]
) -> None:
    set_threads(threads)
    for weight, bias, x in layers():
        whole = product(next(iter(libraries.values())), weight, bias, x)
        assert torch.isfinite(whole).all()
        for library in libraries.values():
            for rows in ROWS:
                assert torch.equal(product(library, weight, bias, x[:rows]), whole[:rows])
                assert torch.equal(product(library, weight, bias, x[-rows:]), whole[-rows:])


@needs_gcc
# The largest numbers become infinite in bfloat16, and one NaN has bits that would round to -0.
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, 3.4e38, torch.tensor(0x7FFFFFFF, dtype=torch.int32)])
def test_what_is_not_finite_stays_in_its_row(libraries: dict[str, Library], strange: float | Tensor) -> None:
    for weight, _, x in layers():
        usual = x.clone()
        x[1, -1] = strange.view(torch.float32) if isinstance(strange, Tensor) else strange
        for library in libraries.values():
            actual, right = product(library, weight, None, x[:20]), product(library, weight, None, usual[:20])
            assert not torch.isfinite(actual[1]).any()
            others = [row for row in range(20) if row != 1]
            assert torch.equal(actual[others], right[others])
