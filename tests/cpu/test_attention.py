"""Attention of the compiled forward against sums in double precision, with sanitizers, and on ARM."""

import shutil
import subprocess
from pathlib import Path

import pytest

from blockdraft.cpu.sources import FLAGS, SOURCE

SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-march=native")
ARM = ("aarch64-linux-gnu-gcc-12", "qemu-aarch64-static")


def check(folder: Path, compiler: str, lanes: int, store: int, *options: str, run: tuple[str, ...] = ()) -> None:
    program, source = folder / "program", Path(__file__).with_name("attention_check.c")
    defines = [
        "-DWEIGHT=0",
        "-DNARROW=0",
        f"-DSTORE={store}",
        f"-DMOST_LANES={lanes}",
        "-DINTEGERS=0",
        f'-DSOURCE="{SOURCE}"',
    ]
    subprocess.run([compiler, *options, *defines, "-o", program, source, "-lm"], check=True)
    done = subprocess.run([*run, program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "252\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("store", [0, 1, 2])
def test_attention_is_right_and_stays_within_its_memory(tmp_path: Path, lanes: int, store: int) -> None:
    check(tmp_path, "gcc", lanes, store, *SANITIZED, "-ffp-contract=off")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ARM)), reason="no compiler for ARM, or no qemu-user")
@pytest.mark.parametrize("store", [0, 1, 2])
def test_attention_is_right_on_arm(tmp_path: Path, store: int) -> None:
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    check(tmp_path, ARM[0], 16, store, *flags, "-march=armv8-a", "-static", run=ARM[1:])
