"""Making of llama.cpp's files, with a stand-in for its quantiser."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.adapters import llama_cpp

from blockdraft.formats.gguf import open_gguf

QUANTISER = """#!{python} -IS
import json, sys
from pathlib import Path

given = json.loads(sys.argv[1])
with open("{log}", "a") as log:
    print(sys.argv[1], file=log)
Path(given["to"]).write_bytes(b"half of it")
sys.exit(not given["threads"])
"""


@pytest.fixture
def asked(tmp_path: Path, constants: Callable[..., None]) -> Callable[[], list[dict[str, Any]]]:
    """Install a quantiser that writes a file in any case and fails if threads are 0. Returns what returns its
    arguments."""
    log, program = tmp_path / "asked", tmp_path / "quantiser"
    program.write_text(QUANTISER.format(python=sys.executable, log=log))
    program.chmod(0o755)
    constants(llama_cpp, PROGRAM=program)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_files_are_made_once_for_each_kind_of_weights(
    tmp_path: Path, asked: Callable[[], list[dict[str, Any]]], tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    settings = {"dtype": "bfloat16", "threads": 2, "models": str(tmp_path / "gguf")}
    target, drafter = str(tiny_target_dir), str(tiny_drafter_dir)
    given = (
        (target, settings),
        (target, settings, "Q4_0"),
        (target, settings, "Q8_0"),
        (drafter, settings, None, target),
    )
    found = {llama_cpp.as_gguf(*each): None for _ in range(2) for each in given}
    commands = asked()
    assert len(found) == 4 and len(commands) == 2
    exact, rounded, _, of_drafter = found
    assert open_gguf(exact).metadata["general.architecture"] == "qwen3"
    assert open_gguf(exact).tensors["blk.0.attn_q.weight"].kind == "BF16"
    assert open_gguf(of_drafter).metadata["general.architecture"] == "dflash"
    assert commands[0]["weights"] == "Q4_0" and commands[0]["quantize"] == str(exact)
    assert rounded.read_bytes() == b"half of it"


def test_what_failed_leaves_nothing(
    tmp_path: Path, asked: object, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    settings = {"dtype": "bfloat16", "threads": 0, "models": str(tmp_path / "gguf")}
    with pytest.raises(llama_cpp.Failed, match="quantiser does not make Q8_0"):
        llama_cpp.as_gguf(str(tiny_target_dir), settings, "Q8_0")
    with pytest.raises(llama_cpp.Failed, match="dflash is none of its families|cannot be exported|cannot be loaded"):
        llama_cpp.as_gguf(str(tiny_drafter_dir), settings)
    assert [file.suffix for file in (tmp_path / "gguf").iterdir()] == [".gguf"]
