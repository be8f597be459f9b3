"""Attention of the compiled forward against sums in double precision, with sanitizers, and on ARM."""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from thinned import LONG

from blockdraft.kernels.cpu.sources import FLAGS, SOURCE
from blockdraft.machine import processor_flags

# What attention does not call is left out, and loops are optimised: a quarter of the time.
WHOLE = ("-O1", "-ffp-contract=off", "-fwhole-program")
SANITIZED = (*WHOLE, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-march=native")
ARM = ("aarch64-linux-gnu-gcc-12", "qemu-aarch64-static")


FLOAT32, BFLOAT16, INT8 = 0, 1, 2  # dtypes of keys and values
# Ways to the same bits: lanes, options of gcc, flags of the processors, and the dtypes for which the way differs.
WAYS = [
    (16, ("-march=x86-64-v4", "-mavx512vnni"), ("avx512_vnni", "avx512vl"), (INT8,)),
    (16, ("-march=x86-64-v4", "-mamx-tile", "-mamx-bf16"), ("avx512vl", "amx_tile", "amx_bf16"), (BFLOAT16,)),
    (16, ("-march=x86-64-v4", "-mavx512bf16", "-msse4a"), ("avx512vl", "avx512_bf16"), (BFLOAT16,)),  # no SSE4a in it
    (16, ("-march=x86-64-v4",), ("avx512bw", "avx512vl"), (FLOAT32, BFLOAT16, INT8)),
    (8, ("-march=x86-64-v3", "-mavxvnni"), ("avx2", "avx_vnni"), (INT8,)),
    (8, ("-march=x86-64-v3",), ("avx2", "fma"), (FLOAT32, BFLOAT16, INT8)),
    (4, ("-march=x86-64-v3",), ("avx2", "fma"), (FLOAT32, BFLOAT16, INT8)),
]


def check(
    folder: Path, compiler: str, lanes: int, store: int, *options: str, run: tuple[str, ...] = (), every: int = 1
) -> str:
    """Compile and run the check, or one of `every` so many of its cases. Returns the digest of its numbers."""
    program, source = folder / "program", Path(__file__).with_name("attention_check.c")
    narrow = int(store == 1)
    defines = [
        f"-DWEIGHT={narrow}",
        f"-DNARROW={narrow}",
        f"-DSTORE={store}",
        f"-DMAX_LANES={lanes}",
        "-DINTEGERS=0",
        f'-DSOURCE="{SOURCE}"',
    ]
    subprocess.run([compiler, *options, *defines, "-o", program, source, "-lm"], check=True)
    done = subprocess.run([*run, program, str(every)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("524 "), done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    ("lanes", "store", "every"),
    [
        *((4, 0, 4), (8, 2, 4), (16, 1, 4)),  # the next test computes all cases, without sanitizers
        *(pytest.param(*each, 1, marks=LONG) for each in product((4, 8, 16), (0, 1, 2))),
    ],
)
def test_attention_is_right_and_stays_within_its_memory(tmp_path: Path, lanes: int, store: int, every: int) -> None:
    check(tmp_path, "gcc", lanes, store, *SANITIZED, every=every)


@pytest.mark.slow
@pytest.mark.skipif("fma" not in processor_flags() or shutil.which("gcc") is None, reason="no FMA, or no gcc")
@pytest.mark.parametrize("store", [0, 1, 2])
def test_all_instructions_compute_the_same_bits(tmp_path: Path, store: int) -> None:
    flags = processor_flags()
    ways = [(lanes, options) for lanes, options, needed, stores in WAYS if {*needed} <= flags and store in stores]
    digests = {check(tmp_path, "gcc", lanes, store, *WHOLE, *options) for lanes, options in ways}
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ARM)), reason="no compiler for ARM, or no qemu-user")
@pytest.mark.parametrize("store", [0, 1, 2])
def test_attention_is_right_on_arm(tmp_path: Path, store: int) -> None:
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    check(tmp_path, ARM[0], 16, store, *flags, "-march=armv8-a", "-static", run=ARM[1:])
