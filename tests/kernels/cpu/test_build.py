"""The compiler runs once for a machine; where it is of no use, that is said."""

import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.kernels.cpu import build as building
from blockdraft.kernels.cpu import library, sources
from blockdraft.kernels.cpu.build import Build
from blockdraft.kernels.cpu.library import Library
from blockdraft.targets import load_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the libraries, empty. The compiler optimises nothing, which takes a tenth of the time."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "libraries"


def compiled() -> Build:
    build = Build(torch.float32, torch.float32, torch.float32)
    assert build.library() is not None, build.reason
    return build


@pytest.mark.slow
def test_a_library_is_compiled_once(folder: Path) -> None:
    compiled()
    [path] = folder.iterdir()  # and nothing half-written
    made = path.stat().st_mtime_ns
    compiled()
    assert path.stat().st_mtime_ns == made


@pytest.mark.slow
def test_each_dtype_and_head_size_has_a_library_of_its_own(folder: Path) -> None:
    libraries = [compiled().library(), Build(*[torch.bfloat16] * 3).library()]
    libraries.append(Build(torch.float32, torch.float32, torch.float32, lanes=4).library())
    libraries.append(Build(torch.bfloat16, torch.float32, torch.bfloat16).library())
    assert len(list(folder.iterdir())) == 4
    assert libraries[2] is not None and libraries[2].lanes == 4
    assert [each and each.inputs_dtype for each in libraries[1::2]] == [torch.bfloat16, torch.float32]


def compiles(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each call of the compiler from now on."""
    calls: list[object] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: calls.append(args) or run(*args, **kwargs))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_library_that_was_cut_short_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The system would load most of such a file, and end the process when what is missing is used."""
    compiled()
    [path] = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: int(share * len(whole))])
    calls = compiles(monkeypatch)
    compiled()
    assert len(calls) == 1 and [each.read_bytes() for each in folder.iterdir()] == [whole]


@pytest.mark.slow
@pytest.mark.parametrize("found", ["without a function", "of another version"])
def test_a_library_of_another_version_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    compiled()
    [path] = folder.iterdir()
    source, text = folder.parent / "other.c", sources.SOURCE.read_text()
    for header in sources.INCLUDED:
        changed = header.read_text().replace("FIELD(S, i64, room)", "FIELD(S, int32_t, room)")
        (folder.parent / header.name).write_text(changed)
    source.write_text("void decoder_forward(void) {}" if found == "without a function" else text)
    kinds = sources.defines(torch.float32, torch.float32, torch.float32, 16, False)
    other = folder.parent / "other.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *kinds, "-o", other, source, "-lm"], check=True)
    ctypes.CDLL(str(other)).decoder_forward  # noqa: B018 (it is a library)
    name = path.stem.split("-")[0]
    path.unlink()
    placed = folder / f"{name}-{hashlib.sha256(other.read_bytes()).hexdigest()[:16]}.so"
    shutil.move(other, placed)
    calls = compiles(monkeypatch)
    compiled()
    assert len(calls) == 1 and path.exists()


@pytest.mark.slow
def test_what_was_compiled_must_have_the_structs_of_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(ctypes.Structure):
        _fields_ = [*library.STRUCTS["Model"]._fields_, ("more", ctypes.c_int64)]  # type: ignore[misc]

    check = library.check_structs
    monkeypatch.setattr(library, "check_structs", lambda made: check(made, {**library.STRUCTS, "Model": Odd}))
    with pytest.raises(AssertionError, match=r"struct Model: .*'more'"):
        Build(torch.float32, torch.float32, torch.float32).library()
    assert list(folder.iterdir()) == []


@pytest.fixture
def slow_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A compiler that is at work until the function is called."""
    folder.mkdir()
    let_go, script = folder.parent / "go", folder.parent / "slow-compiler"
    script.write_text(f'#!/bin/sh\nwhile ! [ -e {let_go} ]; do sleep 0.05; done\nexec gcc "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(building, "SILENT_SECONDS", 0.05)
    building._log_compiling.cache_clear()
    building.begun.cache_clear()
    return let_go.touch


@pytest.mark.slow
def test_a_target_waits_for_the_compiler_and_says_so_once(
    slow_compiler: Callable[[], None],
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = threading.Event()
    tell = building._log_compiling
    monkeypatch.setattr(building, "_log_compiling", lambda: (tell(), told.set()))
    found: list[Any] = []
    loads = [threading.Thread(target=lambda: found.append(load_target(tiny_target_dir, device="cpu"))) for _ in "ab"]
    for load in loads:
        load.start()
    assert told.wait(60)
    assert found == []  # it does not go on without
    slow_compiler()
    for load in loads:
        load.join()
    building.begun.cache_clear()
    assert all(target.compiled is not None and target.compile_reason is None for target in found)
    messages = [(record.levelno, record.getMessage()) for record in caplog.records]
    [(level, message)] = messages
    assert level == logging.WARNING and message.startswith(
        "Compiling for this processor, once for these dtypes; the result is kept in"
    )


def test_a_compiler_that_takes_too_long_is_given_up_and_named(
    slow_compiler: Callable[[], None],
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(building, "LONGEST_SECONDS", 0.2)
    target: Any = load_target(tiny_target_dir, device="cpu")
    building.begun.cache_clear()
    assert target.compiled is None and "timed out after 0.2 seconds" in target.compile_reason
    assert caplog.messages[-1] == f"The target runs uncompiled, which is slower: {target.compile_reason}."


@pytest.mark.slow
def test_processes_that_compile_at_once_each_have_a_whole_library(
    slow_compiler: Callable[[], None], folder: Path
) -> None:
    code = (
        "import torch; from blockdraft.kernels.cpu.build import Build; "
        "print(Build(torch.float32, torch.float32, torch.float32).library().weights_dtype)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    slow_compiler()
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and out == "torch.float32\n"
    [path] = folder.iterdir()
    assert Library(path).lanes >= 4


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "failed")])
def test_a_compiler_of_no_use_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    build = Build(torch.float32, torch.float32, torch.float32)
    assert build.library() is None
    assert build.reason is not None and reason in build.reason and compiler in build.reason
    assert not folder.exists() or list(folder.iterdir()) == []
