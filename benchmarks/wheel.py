"""Build source archives and wheels of all distributions in dist/, and try the wheels: `make wheel`.

The wheel of the core holds kernels compiled for common processors (`kernels/cpu/prebuilt.py`). Everything is built in
`build/wheel` from the files that git tracks, so no library stays in the working tree. The wheels are then installed
into new environments, which take all other packages from the present one: the core alone, each package with what it
needs, and all together. Each environment decodes with the bundled pair, in an empty folder, with an empty cache and a
compiler that fails; shows the commands of its packages; and names the packages that are missing. The status is 1 where
a check fails.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from blockdraft.kernels.cpu.prebuilt import LEVELS, make
from blockdraft.plugins import COMMANDS, PACKAGES, TARGETS

ROOT = Path(__file__).parents[1]
WORK, DIST = ROOT / "build" / "wheel", ROOT / "dist"
CORE = "blockdraft"
FOLDERS = {CORE: Path(), **{name: Path("packages", name.removeprefix("blockdraft-")) for name in PACKAGES}}
LIBRARIES = "src/blockdraft/kernels/cpu/libraries"
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


def tracked(folder: Path = Path()) -> list[str]:
    """Return the files of a distribution that git tracks, relative to its folder."""
    command = ["git", "ls-files", "-z", *PACKED]
    found = subprocess.run(command, cwd=ROOT / folder, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in found if name and (ROOT / folder / name).exists()]


def setuptools(tree: Path, what: str, *options: str) -> Path:
    """Run `build_sdist` or `build_wheel` of setuptools on a tree, into dist/."""
    code = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2], eval(sys.argv[3]))"
    given = repr({"--build-option": list(options)})
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        call = [sys.executable, "-c", code, what, folder, given]
        subprocess.run(call, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        [made] = Path(folder).iterdir()
        return Path(shutil.move(made, DIST / made.name))


def packed(name: str, files: Iterable[str]) -> tuple[Path, Path]:
    """Build the source archive of a distribution from these files, and the wheel from the archive."""
    tree = WORK / name
    for file in files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / FOLDERS[name] / file, tree / file)
    source = setuptools(tree, "build_sdist")
    with tarfile.open(source) as archive:
        archive.extractall(WORK, filter="data")
    tree = WORK / source.name.removesuffix(".tar.gz")
    if name != CORE:
        return source, setuptools(tree, "build_wheel")
    libraries = tree / LIBRARIES
    make(os.environ.get("CC") or "gcc", libraries)
    content = b"".join(path.read_bytes() for path in libraries.iterdir())
    needed = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", content)))
    assert needed <= GLIBC, f"libraries need glibc 2.{needed}; build on a system with at most 2.{GLIBC}"
    return source, setuptools(tree, "build_wheel", "--plat-name", f"manylinux_2_{GLIBC}_{platform.machine()}")


def check_contents(wheel: Path, files: Iterable[str], has_libraries: bool) -> None:
    """Raise an AssertionError unless a wheel holds these files of a distribution, its libraries, and nothing else."""
    right = {name.removeprefix("src/") for name in files if name.startswith("src/")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    libraries = {name for name in found if name.startswith(LIBRARIES.removeprefix("src/"))} if has_libraries else set()
    assert libraries or not has_libraries, "the wheel has no libraries"
    missing, more = sorted(right - found), sorted(found - libraries - right)
    assert not missing and not more, f"{wheel.name} lacks {missing}, and should not have {more}"


def borrowed() -> Path:
    """Return a folder with links to the packages of the present environment, without those of this project."""
    folder = WORK / "borrowed"
    folder.mkdir()
    for site in dict.fromkeys(path for path in sys.path if path.endswith("-packages")):
        for path in Path(site).iterdir():
            own = path.name.startswith(("blockdraft", "__editable__")) or path.suffix == ".pth"
            if not own and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


class Environment:
    """A new environment with some of the distributions, whose other packages are borrowed."""

    def __init__(self, names: Sequence[str], wheels: Iterable[Path], others: Path) -> None:
        self.names, self._home = names, WORK / "environments" / "+".join(names)
        venv.create(self._home)
        [site] = self._home.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(f"{others}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--ignore-installed", *wheels], check=True)

    @property
    def python(self) -> Path:
        return self._home / "bin" / "python"

    def run(self, *command: object, code: int = 0) -> str:
        """Run a command that must end with this code, without a compiler. Return standard output, or else errors."""
        with tempfile.TemporaryDirectory() as folder:
            kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            own = {"BLOCKDRAFT_CACHE": f"{folder}/cache", "CC": "false", "COLUMNS": "120"}
            words = [str(word) for word in command]
            process = subprocess.run(words, cwd=folder, env=kept | own, capture_output=True, text=True)
            assert process.returncode == code, f"{' '.join(words)} ended with {process.returncode}: {process.stderr}"
            assert not Path(folder, "cache", "libraries").exists(), "something was compiled"
        return process.stderr if code else process.stdout

    def blockdraft(self, *words: str, code: int = 0) -> str:
        return self.run(self._home / "bin" / "blockdraft", *words, code=code)

    @cached_property
    def help(self) -> str:
        return self.blockdraft("--help")


def check_use(environment: Environment) -> str:
    """Raise an AssertionError unless an environment decodes by the core's own libraries.

    Returns:
        For which processors the library is that was used here.
    """
    answer = json.loads(environment.blockdraft("generate", "--compare", "--json", "--compile", "on", QUESTION))
    assert "compiled" in answer["running"] and answer["identical"], answer
    found = re.search(r"^compiled decoder.* came with the package, for (.+)$", environment.blockdraft("env"), re.M)
    assert found, "another library was used"
    runtimes = environment.run(environment.python, "-c", RUNTIMES).split()
    assert len(runtimes) == 1, f"there are several OpenMP runtimes: {runtimes}"
    return found[1]


def check_packages(environment: Environment) -> None:
    """Raise an AssertionError unless packages can be imported, show their commands, and are named where missing."""
    imports = "; ".join(f"import {name.replace('-', '_')}" for name in environment.names)
    environment.run(environment.python, "-W", "error", "-c", imports)
    for package, groups in PACKAGES.items():
        for command in groups.get(COMMANDS, ()):
            shown = re.search(rf"^\W*{command}\s", environment.help, re.M) is not None
            assert shown == (package in environment.names), f"--help of {environment.names}: {command} is {shown}"
        if package in environment.names:
            continue
        tried = [[command] for command in groups.get(COMMANDS, ())[:1]]
        tried += [["generate", "--backend", backend, "Hi"] for backend in groups.get(TARGETS, ())]
        for words in tried:
            message = environment.blockdraft(*words, code=2)
            assert f"pip install {package}" in message, f"blockdraft {' '.join(words)}: {message}"


def needed_by(name: str) -> list[str]:
    """Return a distribution and those of this project that it needs, the core first."""
    text = (ROOT / FOLDERS[name] / "pyproject.toml").read_text(encoding="utf-8")
    direct = [other for other in FOLDERS if f'"{other}==' in text]
    return list(dict.fromkeys([*(further for other in direct for further in needed_by(other)), name]))


def main() -> None:
    if sys.platform != "linux" or platform.machine() not in LEVELS:
        sys.exit(f"Wheels with libraries are for Linux on {' and '.join(LEVELS)}. Use `pip wheel .` here.")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    wheels: dict[str, Path] = {}
    for name, folder in FOLDERS.items():
        files = tracked(folder)
        source, wheels[name] = packed(name, files)
        check_contents(wheels[name], files, has_libraries=name == CORE)
        for path in (source, wheels[name]):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB", flush=True)
    others = borrowed()
    for names in [*map(needed_by, FOLDERS), list(FOLDERS)]:
        environment = Environment(names, [wheels[name] for name in names], others)
        check_packages(environment)
        if len(names) in (1, len(FOLDERS)):
            level = check_use(environment)
        print(f"{', '.join(names)}: the commands are there, and what is missing is named", flush=True)
    print(f"The core decodes here with its library for {level}; nothing was compiled.")


if __name__ == "__main__":
    main()
