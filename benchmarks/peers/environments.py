"""Installs the peers, each in an environment of its own under build/peers.

    python -m benchmarks.peers.environments [NAME ...]

What is installed already is left alone, and what failed is tried again. A peer that cannot be installed does not stop
the others: the reason is kept beside it, and the benchmark's table shows it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peers"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"  # its source package holds llama.cpp
REASON_LENGTH = 300  # characters of a failure that are kept


class NotInstalled(Exception):
    """A step failed; the message says why."""


def folder(name: str) -> Path:
    return BUILD / name


def python(name: str) -> Path:
    """The interpreter of an environment."""
    return folder(name) / "venv" / "bin" / "python"


def why_missing(name: str) -> str | None:
    """Why an environment cannot be used, or None where it can."""
    if (folder(name) / ".installed").exists():
        return None
    reason = folder(name) / "failed"
    return reason.read_text() if reason.exists() else "not installed; run `make bench-peers`"


def _run(name: str, *command: str | Path) -> None:
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


def _venv(name: str, *packages: str, constraints: Path | None = ROOT / "constraints.txt") -> None:
    if not python(name).exists():
        _run(name, sys.executable, "-m", "venv", folder(name) / "venv")
    options = ["--quiet", "--no-compile", *(["-c", str(constraints)] if constraints else [])]
    _run(name, python(name), "-m", "pip", "--disable-pip-version-check", "install", *options, *packages)


def _transformers() -> None:
    _venv("transformers", "torch", "transformers")


def _dflash() -> None:
    _venv("dflash", "dflash[local]==0.1.0", constraints=None)  # the extra pins torch and transformers exactly


def _llama_cpp() -> None:
    name, home = "llama_cpp", folder("llama_cpp")
    if not list(home.glob("*.tar.gz")):
        source_only = ("--no-deps", "--no-binary", "llama-cpp-python", LLAMA_CPP_PYTHON)
        _run(name, sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-d", home, *source_only)
    [archive] = home.glob("*.tar.gz")
    source = home / archive.name.removesuffix(".tar.gz")
    if not source.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(home / "unpacking", filter="data")
        (home / "unpacking" / source.name).rename(source)
    cmake, ninja = _tools()
    options = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DLLAMA_CPP_SOURCE={source}/vendor/llama.cpp")
    _run(name, cmake, "-S", HERE, "-B", home / "build", *options, *shlex.split(_llama_options()))
    _build(name, "llama_peer")


def _llama_options() -> str:
    """What the user adds to llama.cpp's build, for a processor on which the usual one does not run."""
    return os.environ.get("LLAMA_CPP_OPTIONS", "")


def _llama_server() -> None:
    """llama.cpp's server, beside what else was built from its sources. It takes longer than all the rest."""
    if failure := install("llama_cpp"):
        raise NotInstalled(failure)
    _build("llama_server", "llama-server")


def _llama_tool() -> None:
    """llama.cpp's own example of speculative decoding, as the tests run it."""
    if failure := install("llama_cpp"):
        raise NotInstalled(failure)
    _build("llama_tool", "llama-speculative-simple")


def _tools() -> list[str]:
    """cmake and ninja, from PyPI where the system has none."""
    tools = [shutil.which(tool) for tool in ("cmake", "ninja")]
    if not all(tools):
        _venv("llama_cpp", "cmake", "ninja")
        tools = [str(python("llama_cpp").with_name(tool)) for tool in ("cmake", "ninja")]
    return [str(tool) for tool in tools]


def _build(name: str, target: str) -> None:
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    _run(name, _tools()[0], "--build", folder("llama_cpp") / "build", "--target", target, "-j", jobs)


INSTALLERS: dict[str, Callable[[], None]] = {"transformers": _transformers, "dflash": _dflash, "llama_cpp": _llama_cpp}
MORE: dict[str, Callable[[], None]] = {"llama_server": _llama_server, "llama_tool": _llama_tool}  # made when named


def _recipe() -> str:
    """Changes with what an environment is made from."""
    made_from = [
        Path(__file__),
        ROOT / "constraints.txt",
        HERE / "CMakeLists.txt",
        *sorted(HERE.glob("adapters/*.cpp")),
    ]
    made_by = b"".join(path.read_bytes() for path in made_from) + _llama_options().encode()
    return hashlib.sha256(made_by).hexdigest()


def install(name: str) -> str | None:
    """Install one environment where that is still to be done; returns why it failed, or None."""
    home, recipe = folder(name), _recipe()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join([*INSTALLERS, *MORE])}; all but {', '.join(MORE)}"
    )
    names = parser.parse_args().names or list(INSTALLERS)
    unknown = set(names) - {*INSTALLERS, *MORE}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*INSTALLERS, *MORE])}.")
    for name in names:
        print(f"{name}: installing in {folder(name)}" if why_missing(name) else f"{name}: checking", flush=True)
        failure = install(name)
        print(f"{name}: {failure or 'ready'}", flush=True)


if __name__ == "__main__":
    main()
