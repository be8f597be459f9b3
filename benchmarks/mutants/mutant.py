"""Mutations of this folder's files, and how one is judged."""

from __future__ import annotations

import ast
import compileall
import hashlib
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
C_DEFINES = ("-DWEIGHT=1", "-DNARROW=1", "-DSTORE=0", "-DMOST_LANES=8", "-DINTEGERS=1")  # any will do for a check


@dataclass(frozen=True)
class Mutant:
    """One mutation.

    Attributes:
        file: What is changed, relative to the root of the repository.
        old, new: The text that is replaced, which must occur exactly once, and what replaces it.
        tests: Tests that should notice, as pytest takes them.
        why: Description of the fault.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def applied(self, text: str) -> str:
        """The file's text with the mutation. Raises ValueError where it does not fit this text."""
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: {self.old!r} occurs {count} times; it must once, and be changed")
        mutated = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            try:
                ast.parse(mutated)
            except SyntaxError as error:
                raise ValueError(f"{self.file}: the mutation is no Python: {error}") from error
        return mutated

    def place(self, root: Path = ROOT) -> str:
        """File and line that are changed; line 0 where the mutation does not fit."""
        before, found, _ = (root / self.file).read_text(encoding="utf-8").partition(self.old)
        line = before.count("\n") + 1 if found else 0
        return f"{self.file.removeprefix('src/blockdraft/')}:{line}"

    def key(self, fingerprint: str) -> str:
        return hashlib.sha256(repr((self, fingerprint)).encode()).hexdigest()[:16]


def read(files: Iterable[Path]) -> list[Mutant]:
    """Entries of TOML files: tables `[[mutant]]` with the fields of `Mutant`."""
    entries = (entry for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"])
    return [Mutant(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]


@dataclass(frozen=True)
class Result:
    """Outcome of a mutation.

    Attributes:
        outcome: "caught", "survived", "skipped" where its tests cannot run here, or "stale" where the mutation or its
            tests no longer fit the code.
        by: The test that failed, or what else happened.
    """

    outcome: str
    seconds: float
    by: str


def copied(root: Path, folder: Path) -> Path:
    """A copy of a working tree without files that git ignores, its sources compiled."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():  # else deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    # Each run would compile them again. What is mutated is compiled anew, since hashes are compared.
    compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


def fingerprint(root: Path) -> str:
    """Hash of sources and tests; results hold as long as these stay."""
    digest = hashlib.sha256()
    for file in sorted(file for part in ("src", "tests") for file in (root / part).rglob("*")):
        if file.suffix in (".py", ".c", ".h", ".html", ".toml", ".json"):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def run_tests(root: Path, tests: Sequence[str], cache: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status of pytest, stopped at the first failure (None: it took too long), and what it printed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-m",
        "not long",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *tests,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root / "src"), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file changed back within a second must not be read from a stale cache
        "OMP_NUM_THREADS": "1",
        "BLOCKDRAFT_CACHE": str(cache),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        how = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=root, env=environment, **how)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


def judge(mutant: Mutant, root: Path, cache: Path, seconds: float) -> Result:
    """Apply a mutation to a copy of the tree, run its tests, and undo it."""
    began, path = time.perf_counter(), root / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant.applied(text), encoding="utf-8")
        if path.suffix not in (".c", ".h"):
            found = _outcome(*run_tests(root, mutant.tests, cache, seconds))
        elif error := _c_error(path.parent):
            found = "stale", error
        else:
            with tempfile.TemporaryDirectory() as own:  # so that no library of other sources is taken
                found = _outcome(*run_tests(root, mutant.tests, Path(own), seconds))
    except ValueError as error:
        found = "stale", str(error)
    finally:
        path.write_text(text, encoding="utf-8")
    outcome, by = found
    return Result(outcome, round(time.perf_counter() - began, 1), by)


def _c_error(folder: Path) -> str:
    """First error of the C compiler, which would fail every test; empty where it compiles."""
    for source in sorted(folder.glob("*.c")):
        command = [os.environ.get("CC", "cc"), "-fsyntax-only", "-march=native", "-fopenmp", *C_DEFINES, str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.splitlines()[0] if done.stderr else "the compiler failed"
    return ""


def _outcome(status: int | None, output: str) -> tuple[str, str]:
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if failed:
        return "caught", failed[1]
    if status is None or "Timeout (" in output:  # pytest ends a test that hangs, and does not name it as failed
        return "caught", "ran out of time"
    if status == 0:
        return ("survived", "") if re.search(r"\d+ passed", output) else ("skipped", "its tests cannot run here")
    if status < 0 or status > 5:
        return "caught", f"the process ended with {status}"
    return "stale", f"pytest ended with {status}: {(output.strip().splitlines() or [''])[-1]}"
