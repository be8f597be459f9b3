"""Choice of a library of the wheel for a processor."""

import platform
import shutil
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from thinned import LONG

from blockdraft.kernels.cpu import prebuilt, sources
from blockdraft.kernels.cpu.build import Build
from blockdraft.kernels.cpu.prebuilt import LEVELS, V3, V4, find, make, runs
from blockdraft.kernels.cpu.sources import command, defines, keep, whole
from blockdraft.machine import processor_flags
from blockdraft.nn.packed import PackedLinear

X86, ARM = "x86_64", "aarch64"
CORE2 = "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat sse sse2 ht lm pni ssse3 cx16 sse4_1 lahf_lm"
IVY_BRIDGE = f"{CORE2} sse4_2 popcnt aes xsave avx f16c rdrand"
HASWELL = f"{IVY_BRIDGE} abm fma movbe bmi1 avx2 bmi2 erms invpcid"
ALDER_LAKE = f"{HASWELL} sha_ni gfni vaes vpclmulqdq avx_vnni serialize hybrid"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512cd avx512er avx512pf"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
ZEN5 = f"{ICE_LAKE} avx_vnni avx512_bf16 sse4a misalignsse"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
ZEN3 = f"{HASWELL} sse4a misalignsse 3dnowprefetch vaes"
CORTEX_A72 = "fp asimd evtstrm crc32 cpuid"
GRAVITON2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        (X86, CORE2, None),
        (X86, IVY_BRIDGE, None),
        (X86, HASWELL, "x86-64-v3"),
        (X86, ZEN3, "x86-64-v3"),
        (X86, KNIGHTS_LANDING, "x86-64-v3"),
        (X86, ALDER_LAKE, "x86-64-v3-vnni"),
        (X86, SKYLAKE_X, "x86-64-v4"),
        (X86, ICE_LAKE, "x86-64-v4-vnni"),
        (X86, ZEN5, "x86-64-v4-bf16"),
        (X86, SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        (X86, SAPPHIRE_RAPIDS.replace("amx", "no"), "x86-64-v4-vnni"),
        (X86, "", None),
        (ARM, CORTEX_A72, "armv8"),
        (ARM, GRAVITON2, "armv8.2-dotprod"),
        (ARM, f"{GRAVITON2} sve i8mm bf16", "armv8.2-i8mm"),
        ("arm64", GRAVITON2, None),
        ("riscv64", HASWELL, None),
    ],
)
def test_each_processor_has_the_best_that_it_runs(machine: str, flags: str, best: str | None) -> None:
    actual = runs(machine, flags.split())
    assert (actual[0].name if actual else None) == best


def test_worse_libraries_run_where_better_ones_do() -> None:
    """If the best library is damaged, the next one is used."""
    assert [level.name for level in runs(X86, f"{ZEN5} {SAPPHIRE_RAPIDS}".split())] == [
        each.name for each in LEVELS[X86]
    ]
    assert [level.name for level in runs(X86, ICE_LAKE.split())] == ["x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that this processor runs."""
    out = tmp_path_factory.mktemp("library") / "own.so"
    given = defines(torch.float32, torch.float32, torch.float32, 16, False)
    subprocess.run(command("gcc", out, "-march=native", "-O0", "-w", *given), check=True)
    return out


Place = Callable[..., Path]


@pytest.fixture
def place(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
    set_processor_flags: Callable[[Collection[str]], None],
) -> Place:
    """Puts a library into the wheel's folder as one of a level. The processor has AVX-512 without VNNI, there is no
    compiler, and the cache is empty."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    constants(prebuilt, FOLDER=folder)
    monkeypatch.setattr(platform, "machine", lambda: X86)
    set_processor_flags(V4)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))

    def placed(name: str) -> Path:
        [level] = [each for each in LEVELS[X86] if each.name == name]
        before = {*folder.iterdir()}
        shutil.copyfile(library, folder / "partial")
        keep(
            folder / "partial",
            prebuilt.file_name(level, defines(torch.float32, torch.float32, torch.float32, 16, True)),
        )
        [path] = {*folder.iterdir()} - before
        return path

    return placed


@pytest.mark.parametrize("integers", [False, True])
def test_with_a_library_of_the_wheel_nothing_is_compiled(place: Place, tmp_path: Path, integers: bool) -> None:
    place("x86-64-v3")
    build = Build(torch.float32, torch.float32, torch.float32, integers=integers)
    assert build.library() is not None and build.reason is None and build.level == "x86-64-v3"
    assert not (tmp_path / "cache").exists()


def test_the_best_library_is_taken(place: Place) -> None:
    for name in ("x86-64-v3", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v3-vnni"):
        place(name)
    actual = find(torch.float32, torch.float32, torch.float32, 16)
    assert actual is not None and actual[1] == "x86-64-v4"


def compiles() -> bool:
    build = Build(torch.float32, torch.float32, torch.float32)
    assert build.library() is None and build.level is None
    return build.reason == "there is no C compiler (no-such-compiler)"


def test_a_processor_without_a_library_has_one_compiled(
    place: Place, set_processor_flags: Callable[[Collection[str]], None]
) -> None:
    place("x86-64-v4-vnni")
    assert compiles()
    place("x86-64-v3")
    set_processor_flags(V3 - {"fma"})
    assert compiles()


def test_a_library_of_the_wheel_that_is_spoilt_is_left(place: Place) -> None:
    path = place("x86-64-v4")
    path.write_bytes(path.read_bytes()[:-1000])
    assert compiles()
    place("x86-64-v3")
    actual = find(torch.float32, torch.float32, torch.float32, 16)
    assert actual is not None and actual[1] == "x86-64-v3"


@pytest.mark.parametrize("changed", [*range(5), "flags"])
def test_a_library_of_other_sources_or_flags_is_left(
    place: Place, tmp_path: Path, constants: Callable[..., None], changed: int | str
) -> None:
    place("x86-64-v4")
    if changed == "flags":
        constants(sources, FLAGS=(*sources.FLAGS, "-O3"))
    else:
        files = [sources.SOURCE, *sources.INCLUDED]
        copy = tmp_path / files[changed].name
        copy.write_bytes(files[changed].read_bytes() + b"\n")
        files[changed] = copy
        constants(sources, SOURCE=files[0], INCLUDED=tuple(files[1:]))
    assert compiles()


@pytest.mark.parametrize(
    ("weights", "inputs", "store", "lanes"),
    [
        (torch.bfloat16, torch.float32, torch.float32, 16),
        (torch.bfloat16, torch.float32, torch.bfloat16, 16),
        (torch.bfloat16, torch.bfloat16, torch.float32, 16),
        (torch.float32, torch.float32, torch.float32, 8),
    ],
)
def test_other_kinds_have_none(
    place: Place, weights: torch.dtype, inputs: torch.dtype, store: torch.dtype, lanes: int
) -> None:
    place("x86-64-v4")
    assert find(torch.float32, torch.float32, torch.float32, 16) is not None
    assert find(weights, inputs, store, lanes) is None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in LEVELS or shutil.which("gcc") is None, reason="not where wheels are made")
@pytest.mark.parametrize(
    ("inputs", "every"),
    [(torch.bfloat16, False), *(pytest.param(each, True, marks=LONG) for each in (torch.bfloat16, torch.float32))],
)
def test_what_is_made_is_found_and_all_levels_compute_the_same(
    tmp_path: Path,
    constants: Callable[..., None],
    set_processor_flags: Callable[[Collection[str]], None],
    inputs: torch.dtype,
    every: bool,
) -> None:
    """Of `every` level, or of those that run here and one that does not."""
    dtypes = torch.bfloat16, inputs, torch.bfloat16
    constants(sources, FLAGS=("-O0", *sources.FLAGS[1:]))  # compiles in a third of the time
    constants(prebuilt, DTYPES=[dtypes], FOLDER=tmp_path / "libraries")
    machine, flags = platform.machine(), {*processor_flags(), "sse4a"}  # which tells AMD's, and is not used
    here = runs(machine, flags)
    levels = (
        LEVELS[machine] if every else [*here, *(each for each in LEVELS[machine] if each not in here)][: len(here) + 1]
    )
    constants(prebuilt, LEVELS={machine: levels})
    make("gcc", tmp_path / "libraries")
    assert len(list((tmp_path / "libraries").iterdir())) == len(levels)
    assert here, "this processor is too old for this test"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 41, generator=generator).bfloat16()
    x = torch.randn(9, 41, generator=generator)
    results = []
    for level in here:
        set_processor_flags(level.needs)
        actual = find(*dtypes, 16)
        assert actual is not None and actual[1] == level.name and actual[0].has_integers
        layer = PackedLinear(weight, None)
        layer.pack(actual[0])
        results.append(layer(x))
    torch.testing.assert_close(results[0], x.to(inputs).float() @ weight.float().T)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc-12") is None, reason="no compiler for ARM")
def test_libraries_for_arm_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: ARM)
    constants(prebuilt, DTYPES=prebuilt.DTYPES[:1])
    make("aarch64-linux-gnu-gcc-12", tmp_path / "made")
    made = sorted((tmp_path / "made").iterdir())
    assert [path.name.rpartition("-")[0].rpartition("-")[0] for path in made] == [
        "armv8",
        "armv8.2-dotprod",
        "armv8.2-i8mm",
    ]
    assert all(path.read_bytes()[18:20] == b"\xb7\x00" for path in made)  # of ARM, 64 bits
    assert whole(tmp_path / "made", made[0].stem.rpartition("-")[0]) is None  # and of no use here
