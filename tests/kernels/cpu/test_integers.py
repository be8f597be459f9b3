"""The integer kernels of every processor that this one can run, against `QuantizedWeight.multiply`."""

import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from thinned import LONG, thinned

from blockdraft.kernels.cpu.library import FACTORS, FLOAT4, INTEGERS, Library
from blockdraft.kernels.cpu.sources import FLAGS, PARALLEL, SOURCE, VECTORS, command
from blockdraft.machine import processor_flags
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import InterleavedWeight, NestedFactors, QuantizedWeight, spans
from blockdraft.nn.quantize_weight import quantize_weight

# gcc's names of processors: what their kernels use, and what the one that runs them must have.
PROCESSORS = {
    "x86-64": ("SSE2", ()),
    "x86-64-v2": ("SSSE3", ("ssse3",)),
    "haswell": ("AVX2", ("avx2", "fma")),
    "alderlake": ("AVX-VNNI", ("avx_vnni",)),
    "skylake-avx512": ("AVX-512", ("avx512bw", "avx512vl")),
    "icelake-server": ("AVX-512 VNNI", ("avx512_vnni", "avx512_vbmi2")),
}
LANES_OF_ARM = 4
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 19)
GROUPS = (8, 16, 24, 32, 128)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Library]:
    """Return a function that compiles the library for a processor and a number of lanes, once."""
    folder = tmp_path_factory.mktemp("libraries")

    def compiled(processor: str, lanes: int) -> Library:
        out = folder / f"{processor}-{lanes}.so"
        defines = ["-DWEIGHT=0", "-DNARROW=0", "-DSTORE=0", f"-DMAX_LANES={lanes}", "-DINTEGERS=1"]
        options = (f"-march={processor}", *VECTORS, *PARALLEL, "-O0")  # compiles in a quarter of the time
        subprocess.run(command("gcc", out, *options, *defines), check=True)
        return Library(out)

    return cache(compiled)


def weights() -> Iterator[QuantizedWeight]:
    generator = torch.Generator().manual_seed(0)
    for bits, group, offsets, outputs in product((4, 8), GROUPS, (None, torch.float32, torch.float16), (1, 149)):
        own = quantize_weight(torch.randn(outputs, 3 * group, generator=generator), bits, group)
        if bits == 8:
            own.codes[0, :2] = -128  # of others' checkpoints
        if offsets is not None:
            codes, offset = own.codes + 8 if bits == 4 else own.codes, torch.randn(own.scale.shape, generator=generator)
            offset[0, 0] = 3 * 2.0**-24  # subnormal in float16
            scale = own.scale.float() if group == 24 else own.scale
            own = QuantizedWeight(codes, scale, offset.to(offsets), bits)
        yield own
    for group, outputs in product((16, 32, 40), (1, 149)):
        codes = torch.randint(0, 16, (outputs, 3 * group), dtype=torch.int8, generator=generator)
        scale = torch.randn(outputs, 3, generator=generator).half()
        yield QuantizedWeight(codes, scale, None, 4, floating=True)
    for bits, group, has_offset, outputs in product((4, 8), (16, 32), (False, True), (1, 149)):
        size, units = 8 * group, 3
        least, most = (-32, 32) if bits == 8 else (0, 16) if has_offset else (-8, 8)
        codes = torch.randint(least, most, (outputs, units * size), dtype=torch.int8, generator=generator)
        scale, offset = (
            NestedFactors(
                torch.randint(-128, 128, (outputs, 8 * units), dtype=torch.int8, generator=generator),
                (torch.randn(outputs, units, generator=generator) / 100).half(),
            )
            for _ in range(2)
        )
        scale.unit[0, 0] = 3 * 2.0**-24
        yield QuantizedWeight(codes, scale, offset if has_offset else None, bits)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(("processor", "lanes"), thinned(PROCESSORS, (4, 8, 16), keep=3, marks=LONG))
def test_each_processor_computes_what_torch_computes(
    processor: str, lanes: int, compiled: Callable[[str, int], Library]
) -> None:
    name, needed = PROCESSORS[processor]
    if not {*needed} <= processor_flags():
        pytest.skip(f"this processor has no {name}")
    library, generator = compiled(processor, lanes), torch.Generator().manual_seed(0)
    for own in weights():
        layer = PackedLinear(own, torch.randn(len(own.codes), generator=generator))
        x = torch.randn(max(ROWS), own.shape[1], generator=generator)
        x[:, 5] *= 100
        right = layer(x)
        layer.pack(library)
        alone = torch.cat([layer(row) for row in x.split(1)])
        torch.testing.assert_close(alone, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), alone[:rows]), (own.bits, own.group, rows)
        if isinstance(own.scale, NestedFactors):
            continue
        offset = None if own.offset is None else own.offset.float()
        wide = PackedLinear(QuantizedWeight(own.codes, own.scale.float(), offset, own.bits, own.floating), layer.bias)
        wide.pack(library)
        assert torch.equal(wide(x), alone), (own.bits, own.group, "float16 holds the same numbers")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_extreme_codes_do_not_overflow(compiled: Callable[[str, int], Library]) -> None:
    """All inputs and all weights at the ends of their ranges, on the instructions that have the least room."""
    processor = "haswell" if "avx2" in processor_flags() else "native"
    library = compiled(processor, 8)  # as in the test above
    for bits, least, most, floating in ((4, -8, 7, False), (8, -128, 127, False), (4, 15, 7, True)):
        for code in (least, most):
            codes = torch.full((20, 256), code, dtype=torch.int8)
            own = QuantizedWeight(codes, torch.ones(20, 2, dtype=torch.float16), None, bits, floating)
            layer = PackedLinear(own)
            layer.pack(library)
            for sign in (-1.0, 1.0):
                exact = torch.full((3, 20), sign * 127 * 256 * float(own.integers[0, 0]))
                assert torch.equal(layer(torch.full((3, 256), sign * 127)), exact)
    for bits, group, code, scale in product((4, 8), (16, 32), (0, 1), (-128, 127)):  # the least and the largest code
        codes = torch.full((20, 256), ((-8, 7) if bits == 4 else (-32, 31))[code], dtype=torch.int8)
        numbers = torch.full((20, 256 // group), scale, dtype=torch.int8)
        unit = torch.ones(20, 1, dtype=torch.float16)
        own = QuantizedWeight(codes, NestedFactors(numbers, unit), None, bits)
        layer = PackedLinear(own)
        layer.pack(library)
        for sign in (-1.0, 1.0):
            exact = torch.full((3, 20), sign * 127 * 256 * float(codes[0, 0]) * scale)
            assert torch.equal(layer(torch.full((3, 256), sign * 127)), exact)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc-12") and shutil.which("qemu-aarch64-static")),
    reason="no compiler for ARM, or no qemu-user",
)
@pytest.mark.parametrize("hidden_states", ["armv8-a", "armv8.2-a+dotprod", "armv8.2-a+dotprod+i8mm"])
def test_arm_computes_what_torch_computes(hidden_states: str, tmp_path: Path) -> None:
    program, data = tmp_path / "program", tmp_path / "data"
    source = Path(__file__).with_name("integers_check.c")
    flags = [f"-march={hidden_states}", *(flag for flag in FLAGS if flag not in ("-shared", "-fPIC"))]
    defines = ["-DWEIGHT=0", "-DNARROW=0", "-DSTORE=0", "-DMAX_LANES=16", "-DINTEGERS=1", f'-DSOURCE="{SOURCE}"']
    subprocess.run(["aarch64-linux-gnu-gcc-12", *flags, *defines, "-static", "-o", program, source, "-lm"], check=True)
    expected = []
    with data.open("wb") as file:
        for own in weights():
            x = torch.randn(9, own.shape[1], generator=torch.Generator().manual_seed(1))
            expected.append(own.multiply(x).flatten())
            laid = InterleavedWeight.of(own, LANES_OF_ARM)
            tensors = laid.tensors()
            kinds = [FACTORS[tensors[name].dtype] if name in tensors else -1 for name in ("scale", "offset")]
            kind = FLOAT4 if own.floating else INTEGERS[own.stored_bits]
            sizes = own.shape[1], own.shape[0], kind, own.group, *kinds, 9
            file.write(struct.pack("<9q", *sizes, laid.codes.nbytes, max(spans(own.scale, own.offset), default=0)))
            for each in (*tensors.values(), x):
                file.write(each.numpy().tobytes())
    actual = subprocess.run(["qemu-aarch64-static", program, data], check=True, capture_output=True).stdout
    numbers = torch.frombuffer(bytearray(actual), dtype=torch.float32)
    right = torch.cat(expected)
    assert len(numbers) == len(right)
    torch.testing.assert_close(numbers, right, rtol=1e-4, atol=3e-3)
