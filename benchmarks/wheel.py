"""Makes a source archive and a wheel in dist/, and tries the wheel: `make wheel`.

The wheel holds kernels compiled for common processors (`kernels/cpu/prebuilt.py`). It is built in `build/wheel` from
the files that git tracks, so that no library lies in the working tree. Then it is installed there into a new
environment, which takes all other packages from the present one, and decodes with the bundled pair in an empty folder,
with an empty cache and a compiler that fails. The status is 1 where a check fails.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from blockdraft.kernels.cpu.prebuilt import LEVELS, make

ROOT = Path(__file__).parents[1]
WORK, DIST = ROOT / "build" / "wheel", ROOT / "dist"
PACKED = ("pyproject.toml", "README.md", "LICENSE", "src")
GLIBC = 28  # 2.28: that of torch's own wheels
QUESTION = "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?"
RUNTIMES = """
import sys, torch
from pathlib import Path
from blockdraft.kernels.cpu.prebuilt import FOLDER, DTYPES, find
assert all(find(*dtypes, 16) for dtypes in DTYPES)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]})
"""


def tracked() -> list[str]:
    """Files of the package that git knows."""
    command = ["git", "ls-files", "-z", *PACKED]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in found if name and (ROOT / name).exists()]


def setuptools(tree: Path, what: str, *options: str) -> Path:
    """Run `build_sdist` or `build_wheel` of setuptools on a tree, into dist/."""
    code = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2], eval(sys.argv[3]))"
    given = repr({"--build-option": list(options)})
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        call = [sys.executable, "-c", code, what, folder, given]
        subprocess.run(call, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        [made] = Path(folder).iterdir()
        return Path(shutil.move(made, DIST / made.name))


def packed(names: Iterable[str]) -> tuple[Path, Path]:
    """The source archive of these files, and the wheel made of it."""
    tree = WORK / "tree"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    source = setuptools(tree, "build_sdist")
    with tarfile.open(source) as archive:
        archive.extractall(WORK, filter="data")
    tree = WORK / source.name.removesuffix(".tar.gz")
    libraries = tree / "src" / "blockdraft" / "cpu" / "libraries"
    make(os.environ.get("CC") or "gcc", libraries)
    content = b"".join(path.read_bytes() for path in libraries.iterdir())
    needed = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", content)))
    assert needed <= GLIBC, f"libraries need glibc 2.{needed}; build on a system with at most 2.{GLIBC}"
    return source, setuptools(tree, "build_wheel", "--plat-name", f"manylinux_2_{GLIBC}_{platform.machine()}")


def check_contents(wheel: Path, names: Iterable[str]) -> None:
    """Raise an AssertionError unless a wheel holds these files of the package, and libraries, and nothing else."""
    right = {name.removeprefix("src/") for name in names if name.startswith("src/")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    libraries = {name for name in found if name.startswith("blockdraft/kernels/cpu/libraries/")}
    assert libraries, "the wheel has no libraries"
    missing, more = sorted(right - found), sorted(found - libraries - right)
    assert not missing and not more, f"the wheel lacks {missing}, and should not have {more}"


def check_use(wheel: Path) -> str:
    """Raise an AssertionError unless the installed wheel decodes by its own libraries.

    Returns:
        For which processors the library is that was used here.
    """
    home = WORK / "environment"
    venv.create(home, with_pip=True)
    python, [site] = home / "bin" / "python", home.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder, but does not read the .pth files there, one of which is for the working tree.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--ignore-installed", wheel], check=True)
    with tempfile.TemporaryDirectory() as folder:
        own = {"BLOCKDRAFT_CACHE": f"{folder}/cache", "CC": "false"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def output(*command: object) -> str:
            return subprocess.run(command, cwd=folder, env=kept | own, check=True, stdout=-1, text=True).stdout

        blockdraft = home / "bin" / "blockdraft"
        answer = json.loads(output(blockdraft, "generate", "--compare", "--json", "--compile", "on", QUESTION))
        assert "compiled" in answer["running"] and answer["identical"], answer
        level = re.search(r"^compiled decoder.* came with the package, for (.+)$", output(blockdraft, "env"), re.M)
        assert level, "another library was used"
        assert not Path(folder, "cache", "libraries").exists(), "something was compiled"
        runtimes = output(python, "-c", RUNTIMES).split()
        assert len(runtimes) == 1, f"there are several OpenMP runtimes: {runtimes}"
    return level[1]


def main() -> None:
    if sys.platform != "linux" or platform.machine() not in LEVELS:
        sys.exit(f"Wheels with libraries are for Linux on {' and '.join(LEVELS)}. Use `pip wheel .` here.")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    names = tracked()
    source, wheel = packed(names)
    check_contents(wheel, names)
    level = check_use(wheel)
    for path in (source, wheel):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    print(f"The wheel decodes here with its library for {level}; nothing was compiled.")


if __name__ == "__main__":
    main()
