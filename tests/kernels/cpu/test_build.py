"""The library is compiled once per machine; a compiler that fails is named."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.kernels.cpu import build as building
from blockdraft.kernels.cpu import prebuilt, sources
from blockdraft.kernels.cpu.build import Build
from blockdraft.kernels.cpu.library import Library
from blockdraft.targets import load_target


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a compiler that does not optimize, which takes a tenth of the time."""
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho >> {tmp_path / "calls"}\nexec gcc "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


@pytest.fixture
def folder(quick_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder of libraries."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "libraries"


def compiled() -> Build:
    build = Build(torch.float32, torch.float32, torch.float32)
    library = build.library()
    assert library is not None and library.weights_dtype == torch.float32, build.reason
    return build


def num_calls(folder: Path) -> int:
    """Return how often the compiler was called."""
    return (folder.parent / "calls").read_text().count("\n")


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


@pytest.mark.slow
def test_a_library_that_was_cut_short_is_compiled_again(folder: Path) -> None:
    """The system would load an incomplete file, and end the process when a missing part is used."""
    compiled()
    [path] = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: len(whole) // 2])
    compiled()
    assert num_calls(folder) == 2 and [path.read_bytes() for path in folder.iterdir()] == [whole]


@pytest.mark.slow
@pytest.mark.parametrize("actual", ["without a function", "of another version"])
def test_a_library_of_another_version_is_compiled_again(folder: Path, actual: str) -> None:
    compiled()
    [path] = folder.iterdir()
    source, text = folder.parent / "other.c", sources.SOURCE.read_text()
    for header in sources.INCLUDED:
        changed = header.read_text().replace("FIELD(S, i64, room)", "FIELD(S, int32_t, room)")
        (folder.parent / header.name).write_text(changed)
    source.write_text("void decoder_forward(void) {}" if actual == "without a function" else text)
    kinds = sources.defines(torch.float32, torch.float32, torch.float32, 16, False)
    other = folder.parent / "other.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *kinds, "-o", other, source, "-lm"], check=True)
    ctypes.CDLL(str(other)).decoder_forward  # noqa: B018 (it is a library)
    name = path.stem.split("-")[0]
    path.unlink()
    placed = folder / f"{name}-{hashlib.sha256(other.read_bytes()).hexdigest()[:16]}.so"
    shutil.move(other, placed)
    compiled()
    assert num_calls(folder) == 2 and path.exists()


@pytest.fixture
def slow_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]) -> Callable[[], None]:
    """Set a compiler that finishes only after the returned function is called."""
    folder.mkdir()
    let_go, script = folder.parent / "go", folder.parent / "slow-compiler"
    script.write_text(f'#!/bin/sh\nwhile ! [ -e {let_go} ]; do sleep 0.05; done\nexec {os.environ["CC"]} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    constants(building, SILENT_SECONDS=0.05)
    building.log_compiling.cache_clear()
    building.begun.cache_clear()
    return let_go.touch


@pytest.mark.slow
def test_a_target_waits_for_the_compiler_and_says_so_once(
    slow_compiler: Callable[[], None], tiny_target_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actual: list[Any] = []
    loads = [threading.Thread(target=lambda: actual.append(load_target(tiny_target_dir, device="cpu"))) for _ in "ab"]
    for load in loads:
        load.start()
    until = time.monotonic() + 60
    while not caplog.records:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert actual == []  # it does not go on without
    slow_compiler()
    for load in loads:
        load.join()
    building.begun.cache_clear()
    assert all(target.compiled is not None and target.compile_reason is None for target in actual)
    messages = [(record.levelno, record.getMessage()) for record in caplog.records]
    [(level, message)] = messages
    assert level == logging.WARNING and message.startswith(
        "Compiling for this processor, once for these dtypes; the result is kept in"
    )


def test_a_compiler_that_takes_too_long_is_given_up_and_named(
    slow_compiler: Callable[[], None],
    tiny_target_dir: Path,
    constants: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    constants(building, LONGEST_SECONDS=0.2)
    target: Any = load_target(tiny_target_dir, device="cpu")
    building.begun.cache_clear()
    assert target.compiled is None and "timed out after 0.2 seconds" in target.compile_reason
    assert caplog.messages[-1] == f"The target runs uncompiled, which is slower: {target.compile_reason}."


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_of_processes_that_begin_at_once_one_compiles(slow_compiler: Callable[[], None], folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Semaphore(0)
    processes = [context.Process(target=lambda: (begun.release(), compiled()), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    for _ in processes:
        assert begun.acquire(timeout=60)
    time.sleep(0.5)
    slow_compiler()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    [path] = folder.iterdir()
    assert Library(path).lanes >= 4 and num_calls(folder) == 1


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "failed")])
def test_a_compiler_of_no_use_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    build = Build(torch.float32, torch.float32, torch.float32)
    assert build.library() is None
    assert build.reason is not None and reason in build.reason and compiler in build.reason
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named_and_a_temporary_one_used(
    quick_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    constants(prebuilt, FOLDER=tmp_path / "no wheel")
    build = Build(torch.float32, torch.float32, torch.float32)
    assert build.library() is not None and build.reason is None
    assert f"{tmp_path / 'file' / 'libraries'} cannot be written (Not a directory)" in caplog.text
    assert "Set BLOCKDRAFT_CACHE to another folder" in caplog.text
