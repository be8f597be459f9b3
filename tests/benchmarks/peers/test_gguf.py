"""How llama.cpp's files are made; what makes them is llama.cpp's."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.adapters import llama_cpp


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; it writes the files that are asked for, unless a model is named so."""
    asked: list[list[str]] = []

    def run(command: list[str], **others: Any) -> Any:
        asked.append(command)
        is_quantiser = command[0] == str(llama_cpp.PROGRAM)
        out = Path(json.loads(command[1])["to"] if is_quantiser else command[command.index("--outfile") + 1])
        out.write_bytes(b"half of it")
        return subprocess.CompletedProcess(command, int("no good" in str(command)))

    monkeypatch.setattr(llama_cpp.subprocess, "run", run)
    monkeypatch.setattr(llama_cpp, "source", lambda: tmp_path)
    return asked


def model(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def test_files_are_made_once_for_each_kind_of_weights(tmp_path: Path, commands: list[list[str]]) -> None:
    settings = {"dtype": "bfloat16", "threads": 2, "models": str(tmp_path / "gguf")}
    one, other = model(tmp_path / "one", b"1"), model(tmp_path / "other", b"2")
    found = {
        llama_cpp.as_gguf(*given)
        for _ in range(2)
        for given in ((one, settings), (one, settings, "Q4_0"), (one, settings, "Q8_0"), (other, settings, None, one))
    }
    assert len(found) == len(commands) == 4 and all(path.exists() for path in found)
    converted, rounded, _, drafter = commands
    assert converted[converted.index("--outtype") + 1] == "bf16" and "--target-model-dir" not in converted
    assert json.loads(rounded[1])["weights"] == "Q4_0" and Path(json.loads(rounded[1])["quantize"]).exists()
    assert drafter[drafter.index("--target-model-dir") + 1] == one


def test_what_failed_leaves_nothing(tmp_path: Path, commands: list[list[str]]) -> None:
    settings = {"dtype": "bfloat16", "threads": 2, "models": str(tmp_path / "gguf")}
    with pytest.raises(llama_cpp.Failed, match="converter does not take"):
        llama_cpp.as_gguf(model(tmp_path / "no good", b"1"), settings)
    assert list((tmp_path / "gguf").iterdir()) == []
