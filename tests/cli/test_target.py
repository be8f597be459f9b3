"""The options that say which target is loaded and how, on every command that decodes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.cli.target import DecodingSettings
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
    target = DecodingSettings(target=str(tiny_target_dir), quantize="int8", **settings).load_for("none")
    assert (str(target.dtype), target.backend) == ("torch.bfloat16", "native")
    assert "int8 weights" in target.running and "exact" in target.running
    with pytest.raises(UsageError, match="kv_dtype is 'int8', which only a forward compiled for a CPU can do"):
        DecodingSettings(target=str(tiny_target_dir), kv_dtype="int8", **settings).load_for("none")


def test_more_threads_than_processors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    before, most = torch.get_num_threads(), os.cpu_count() or 1
    try:
        for threads in (most, most + 1):
            with pytest.raises(UsageError, match="/no/such"):
                DecodingSettings(target="/no/such", threads=threads).load_for("none")
            warning = f"--threads is {threads}, more than this machine's {most} processors"
            assert (warning in capsys.readouterr().err) == (threads > most)
    finally:
        torch.set_num_threads(before)


def test_adapter_excludes_a_server(blockdraft: Run) -> None:
    done = blockdraft("data", "x.jsonl", "--out", "x", "--adapter", "some/lora")
    assert done.code == 2 and "--adapter is for our own engine" in done.err
