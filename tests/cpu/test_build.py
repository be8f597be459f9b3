"""The compiler runs once for a machine; where it is of no use, that is said."""

from pathlib import Path

import pytest
import torch

from blockdraft.cpu.build import Build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the libraries, empty."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "libraries"


def compiled() -> Build:
    build = Build(torch.float32, torch.float32)
    assert build.library() is not None, build.reason
    return build


def test_a_library_is_compiled_once(folder: Path) -> None:
    compiled()
    [path] = folder.iterdir()  # and nothing half-written
    made = path.stat().st_mtime_ns
    compiled()
    assert path.stat().st_mtime_ns == made


@pytest.mark.slow
def test_each_dtype_and_head_size_has_a_library_of_its_own(folder: Path) -> None:
    libraries = [compiled().library(), Build(torch.bfloat16, torch.bfloat16).library()]
    libraries.append(Build(torch.float32, torch.float32, head_dim=12).library())
    assert len(list(folder.iterdir())) == 3
    assert libraries[2] is not None and libraries[2].lanes == 4


@pytest.mark.slow
def test_a_file_that_is_no_library_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    [path] = folder.iterdir()
    other = folder / "other" / "libraries"
    other.mkdir(parents=True)
    (other / path.name).write_bytes(b"spoilt")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(other.parent))
    compiled()
    assert (other / path.name).stat().st_size == path.stat().st_size


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "failed")])
def test_a_compiler_of_no_use_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    build = Build(torch.float32, torch.float32)
    assert build.library() is None
    assert build.reason is not None and reason in build.reason and compiler in build.reason
    assert not folder.exists() or list(folder.iterdir()) == []
