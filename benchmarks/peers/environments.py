"""Installs the peers, each in an environment of its own under build/peers.

    python -m benchmarks.peers.environments [NAME ...]

Installed environments are kept, and failed ones are tried again. A peer that cannot be installed does not stop the
others: the reason is kept beside it, and the benchmark's table shows it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.command import ROOT, Parser
from benchmarks.harness.process import REASON_LENGTH

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "peers"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"  # its source package holds llama.cpp
LLAMA_OPTIONS = "LLAMA_CPP_OPTIONS"  # CMake options of the user, for processors on which the usual build fails


class NotInstalled(Exception):
    """A step failed; the message says why."""


def folder(name: str) -> Path:
    return BUILD / name


def python(name: str) -> Path:
    """Return the interpreter of an environment."""
    return folder(name) / "venv" / "bin" / "python"


def why_missing(name: str) -> str | None:
    """Return why an environment cannot be used, or None if it can."""
    if (folder(name) / ".installed").exists():
        return None
    reason = folder(name) / "failed"
    return (
        reason.read_text()
        if reason.exists()
        else f"not installed; run `make bench-{'engines' if name in MORE else 'peers'}`"
    )


def run_logged(name: str, *command: str | Path) -> None:
    with (folder(name) / "install.log").open("a") as log:
        try:
            subprocess.run([str(part) for part in command], stdout=log, stderr=subprocess.STDOUT, check=True, cwd=ROOT)
        except FileNotFoundError as error:
            raise NotInstalled(f"{command[0]} is not there") from error
        except subprocess.CalledProcessError as error:
            log.flush()
            lines = Path(log.name).read_text(errors="replace").splitlines()
            told = [line for line in lines if "error" in line.lower()] or lines or [""]
            raise NotInstalled(f"{told[-1].strip()[:REASON_LENGTH]} ({log.name})") from error


def _pip(name: str, *words: str | Path, interpreter: str | Path = sys.executable) -> None:
    run_logged(name, interpreter, "-m", "pip", "--disable-pip-version-check", *words)


def _venv(name: str, *packages: str, constraints: Path | None = ROOT / "constraints.txt") -> None:
    if not python(name).exists():
        run_logged(name, sys.executable, "-m", "venv", folder(name) / "venv")
    limits = ["-c", constraints] if constraints else []
    _pip(name, "install", "--quiet", "--no-compile", *limits, *packages, interpreter=python(name))


def _llama_cpp() -> None:
    name, home = "llama_cpp", folder("llama_cpp")
    if not list(home.glob("*.tar.gz")):
        _pip(name, "download", "-d", home, "--no-deps", "--no-binary", "llama-cpp-python", LLAMA_CPP_PYTHON)
    [archive] = home.glob("*.tar.gz")
    source = home / archive.name.removesuffix(".tar.gz")
    if not source.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(home / "unpacking", filter="data")
        (home / "unpacking" / source.name).rename(source)
    cmake, ninja = build_tools()
    options = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DLLAMA_CPP_SOURCE={source}/vendor/llama.cpp")
    run_logged(name, cmake, "-S", HERE, "-B", home / "build", *options, *shlex.split(os.environ.get(LLAMA_OPTIONS, "")))
    _build(name, "llama_peer")


def _with_llama_cpp(name: str, target: str) -> None:
    """Build another program of llama.cpp's sources."""
    if failure := install("llama_cpp"):
        raise NotInstalled(failure)
    _build(name, target)


def build_tools() -> list[str]:
    """Return cmake and ninja, from PyPI if the system has none."""
    tools = [shutil.which(tool) for tool in ("cmake", "ninja")]
    if not all(tools):
        _venv("llama_cpp", "cmake", "ninja")
        tools = [str(python("llama_cpp").with_name(tool)) for tool in ("cmake", "ninja")]
    return [str(tool) for tool in tools]


def _build(name: str, target: str) -> None:
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    run_logged(name, build_tools()[0], "--build", folder("llama_cpp") / "build", "--target", target, "-j", jobs)


def _made(name: str) -> None:
    """Link an environment that the Makefile sets up for the tests."""
    environment = ROOT / f".venv-{name}"
    run_logged(name, "make", f"{environment.name}/.installed")
    link = folder(name) / "venv"
    link.unlink(missing_ok=True)
    link.symlink_to(environment)


INSTALLERS: dict[str, Callable[[], None]] = {
    "transformers": lambda: _venv("transformers", "torch", "transformers"),
    # The extra pins torch and transformers exactly.
    "dflash": lambda: _venv("dflash", "dflash[local]==0.1.0", constraints=None),
    "llama_cpp": _llama_cpp,
}
MORE: dict[str, Callable[[], None]] = {  # installed only when named
    "llama_server": lambda: _with_llama_cpp("llama_server", "llama-server"),  # takes longer than all the rest
    "llama_bench": lambda: _with_llama_cpp("llama_bench", "llama-bench"),
    "vllm": lambda: _made("vllm"),  # gigabytes
    "openvino": lambda: _made("openvino"),
    "mistral_rs": lambda: _venv("mistral_rs", "mistralrs==0.9.5", "tokenizers"),
    "llama_tool": lambda: _with_llama_cpp("llama_tool", "llama-speculative-simple"),  # for the tests
}


def current_recipe() -> str:
    """Return a hash of all that environments are made from."""
    files = [Path(__file__), ROOT / "constraints.txt", HERE / "CMakeLists.txt", *sorted(HERE.glob("adapters/*.cpp"))]
    content = b"".join(path.read_bytes() for path in files) + os.environ.get(LLAMA_OPTIONS, "").encode()
    return hashlib.sha256(content).hexdigest()


def install(name: str) -> str | None:
    """Install one environment unless that is done; returns why it failed, or None."""
    home, recipe = folder(name), current_recipe()
    done, failed = home / ".installed", home / "failed"
    if done.exists() and done.read_text() == recipe:
        return None
    home.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    (home / "install.log").unlink(missing_ok=True)
    try:
        (INSTALLERS | MORE)[name]()
    except (NotInstalled, OSError) as error:
        failed.write_text(str(error))
        return str(error)
    failed.unlink(missing_ok=True)
    done.write_text(recipe)
    return None


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    known = [*INSTALLERS, *MORE]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; by default all but {', '.join(MORE)}"
    )
    names = parser.parse(words).names or list(INSTALLERS)
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    for name in names:
        print(f"{name}: installing in {folder(name)}" if why_missing(name) else f"{name}: checking", flush=True)
        print(f"{name}: {install(name) or 'ready'}", flush=True)


if __name__ == "__main__":
    main()
