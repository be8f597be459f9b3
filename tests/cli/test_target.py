"""The options that say which target is loaded and how, on every command that decodes."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.cli.target import DecodingSettings, drafter_or_lookup, need_drafter
from blockdraft.errors import UsageError

Run = Callable[..., Any]
COMMANDS = {
    "generate": ("hello",),
    "chat": (),
    "bench": ("--prompts", "PROMPTS"),
    "calibrate": (),
    "data": ("PROMPTS", "--out", "OUT", "--regenerate"),
    "hidden-states": ("--data", "DATA", "--out", "OUT"),
    "train": ("dflash", "--data", "DATA", "--out", "OUT"),
    "export": ("DRAFTER", "--out", "OUT"),
}
DECODING = ("generate", "chat", "bench", "calibrate")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("fresh_accelerator")
def test_adapter_and_revision_reach_the_loader(
    command: str, tmp_path: Path, tiny_data_dir: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, blockdraft: Run
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    places = {"PROMPTS": tmp_path / "prompts.jsonl", "DATA": tiny_data_dir, "OUT": tmp_path / "out"}
    places["DRAFTER"] = tiny_drafter_dir
    words: list[object] = [places.get(word, word) for word in COMMANDS[command]]
    words += ["--drafter", "lookup"] if command in DECODING else []
    words += ["--target", tiny_target_dir, *(() if command == "export" else ("--device", "cpu"))]
    assert "There is no folder /no/lora" in blockdraft(command, *words, "--adapter", "/no/lora").err
    assert "is 'v2', and" in blockdraft(command, *words, "--revision", "v2").err


def test_target_settings_reach_the_loader(tiny_target_dir: Path) -> None:
    settings = {"dtype": "bfloat16", "device": "cpu", "backend": "native", "compile": "off", "exact": True}
    target = DecodingSettings(str(tiny_target_dir), quantize="int8", **settings).load_for("none")
    assert (str(target.dtype), target.backend) == ("torch.bfloat16", "native")
    assert "int8 weights" in target.running and "exact" in target.running
    with pytest.raises(UsageError, match="kv_dtype is 'int8', which only a forward compiled for a CPU can do"):
        DecodingSettings(str(tiny_target_dir), kv_dtype="int8", **settings).load_for("none")


def test_more_threads_than_processors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    before, most = torch.get_num_threads(), os.cpu_count() or 1
    try:
        for threads in (most, most + 1):
            with pytest.raises(UsageError, match="/no/such"):
                DecodingSettings("/no/such", threads=threads).load_for("none")
            warning = f"--threads is {threads}, more than this machine's {most} processors"
            assert (warning in capsys.readouterr().err) == (threads > most)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("command", ["bench", "calibrate"])
def test_a_target_without_a_drafter_is_reported_how_to_get_one(command: str, tmp_path: Path, blockdraft: Run) -> None:
    done = blockdraft(command, *(tmp_path if word == "PROMPTS" else word for word in COMMANDS[command]),
                      "--target", "some/model")  # fmt: skip
    assert done.code == 2 and "No drafter is known for some/model; add --drafter DIR" in done.err
    assert "blockdraft fit --target some/model --out DIR" in done.err


def test_remedy_for_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="blockdraft fit --target model.gguf --out DIR"):
        need_drafter("model.gguf", None, "or none")


def test_a_broken_gguf_file_is_reported_before_a_drafter_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is GGUF of version 0"):
        drafter_or_lookup(str(tmp_path / "model.gguf"), None)


def test_adapter_excludes_a_server(blockdraft: Run) -> None:
    done = blockdraft("data", "x.jsonl", "--out", "x", "--adapter", "some/lora")
    assert done.code == 2 and "--adapter is for our own engine" in done.err
