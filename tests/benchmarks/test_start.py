import sys
from pathlib import Path

import pytest
from benchmarks.start import Measured, arguments, commands, forget, least, run


@pytest.mark.slow
def test_memory_and_times_are_those_of_the_process() -> None:
    small = run([sys.executable, "-c", "pass"], 1)
    large = run([sys.executable, "-c", "b = bytearray(200_000_000); b[::4096] = b'1' * len(b[::4096])"], 1)
    assert 190 < large.peak_mb - small.peak_mb < 220
    waiting = run([sys.executable, "-c", "import time; time.sleep(0.5)"], 1)
    assert waiting.seconds >= 0.5 and waiting.cpu_seconds < waiting.seconds


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="ended with 1: .*no such luck"):
        run([sys.executable, "-c", "raise SystemExit('no such luck')"], 1)


def test_the_least_of_each_column_counts() -> None:
    assert least([Measured(1, 5, 9), Measured(2, 4, 8)]) == Measured(1, 4, 8)


def test_files_are_forgotten_and_stay(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    forget(tmp_path)
    forget(tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF"


def test_llama_is_measured_where_it_is_given(tmp_path: Path) -> None:
    model, program = tmp_path / "model.gguf", tmp_path / "llama_peer"
    model.touch()
    program.touch()
    assert "llama.cpp" not in commands(arguments([str(model)]))
    assert "llama.cpp" in commands(arguments([str(model), "--llama", str(program)]))
    with pytest.raises(SystemExit):
        arguments([str(tmp_path / "absent.gguf")])
