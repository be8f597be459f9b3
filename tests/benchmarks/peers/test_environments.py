import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.peers import environments


@pytest.fixture(autouse=True)
def build(tmp_path: Path, constants: Callable[..., None]) -> Path:
    constants(environments, BUILD=tmp_path)
    return tmp_path


def test_failures_are_kept_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('error: no such compiler'); sys.exit(3)"
    monkeypatch.setitem(
        environments.INSTALLERS, "a", lambda: environments.run_logged("a", sys.executable, "-c", program)
    )
    for _ in range(2):
        failure = environments.install("a")
        assert failure and failure.startswith("error: no such compiler (")
        assert environments.why_missing("a") == failure
    monkeypatch.setitem(environments.INSTALLERS, "a", lambda: None)
    assert environments.install("a") is None
    assert environments.why_missing("a") is None
    assert not (environments.folder("a") / "failed").exists()


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.INSTALLERS, "a", lambda: environments.run_logged("a", "no-such-cmake"))
    assert environments.install("a") == "no-such-cmake is not there"


def test_what_is_installed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(environments.INSTALLERS, "a", lambda: calls.append(1))
    for _ in range(2):
        environments.install("a")
    assert len(calls) == 1
    monkeypatch.setenv("LLAMA_CPP_OPTIONS", "-DGGML_NATIVE=OFF")
    environments.install("a")
    assert len(calls) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_other_options_build_llama_cpp_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, tools = tmp_path / "ran", tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        (tools / name).write_text(f'#!/bin/sh\necho "$@" >> {ran}\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    home = environments.folder("llama_cpp")
    (home / "llama").mkdir(parents=True)
    (home / "llama.tar.gz").touch()
    for options in ("", "-DGGML_NATIVE=OFF -DGGML_AVX512=ON", "-DGGML_NATIVE=OFF -DGGML_AVX512=ON"):
        monkeypatch.setenv("LLAMA_CPP_OPTIONS", options)
        assert environments.install("llama_cpp") is None
    configured = [line for line in ran.read_text().splitlines() if "-S" in line.split()]
    assert len(configured) == 2 and configured[1].endswith(" -DGGML_NATIVE=OFF -DGGML_AVX512=ON")


def test_one_failure_does_not_stop_the_others(
    constants: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise environments.NotInstalled("no network")

    constants(environments, INSTALLERS={"a": fails, "b": lambda: None})
    environments.main([])
    printed = capsys.readouterr().out
    assert "a: no network" in printed and "b: ready" in printed
