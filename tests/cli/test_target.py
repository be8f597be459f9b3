"""The options that say which target is loaded and how, on every command that decodes."""

import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockdraft import cli, timing
from blockdraft.cli.target import drafter_or_lookup, load, need_drafter
from blockdraft.drafters import BUNDLED_DFLASH, bundled
from blockdraft.errors import UsageError
from blockdraft.targets import load_target_text

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


class Loaded(Exception):
    """Raised in the place of loading, with what was asked for."""


def asked(monkeypatch: pytest.MonkeyPatch, *args: object) -> dict[str, Any]:
    """What `load_target` is called with by a command."""

    def load_target(path: str, dtype: Any, device: Any, backend: str, **how: Any) -> None:
        raise Loaded({"path": path, "dtype": dtype, "device": str(device), "backend": backend, **how})

    text = load_target_text()
    monkeypatch.setattr("blockdraft.targets.load_target_text", lambda *_: text)
    monkeypatch.setattr("blockdraft.targets.load_target", load_target)
    monkeypatch.setattr(sys, "argv", ["blockdraft", *map(str, args)])
    with pytest.raises(Loaded) as found:
        cli.main()
    given: dict[str, Any] = found.value.args[0]
    return given


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("fresh_accelerator")
def test_adapter_and_revision_reach_the_loader(
    command: str, tmp_path: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    places = {"PROMPTS": tmp_path / "prompts.jsonl", "DATA": tiny_data_dir, "OUT": tmp_path / "out"}
    places["DRAFTER"] = bundled()[BUNDLED_DFLASH]
    args = [places.get(arg, arg) for arg in COMMANDS[command]]
    own = ("--drafter", "none") if command in DECODING else ()
    device = () if command == "export" else ("--device", "cpu")
    target = ("--target", "some/model", "--adapter", "some/lora", "--revision", "v2", *device)
    given = asked(monkeypatch, command, *args, *target, *own)
    assert {name: given[name] for name in ("path", "adapter", "revision", "device")} == {
        "path": "some/model",
        "adapter": "some/lora",
        "revision": "v2",
        "device": "cpu",
    }


@pytest.mark.parametrize("command", DECODING)
def test_how_a_target_is_run_reaches_the_loader(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    args = [tmp_path / "prompts.jsonl" if arg == "PROMPTS" else arg for arg in COMMANDS[command]]
    usual = {"path": None, "dtype": None, "device": "None", "backend": "auto", "threads": "auto", "compile": "auto"}
    usual |= {
        "quantize": None,
        "kv_dtype": None,
        "round_drafters": True,
        "exact": False,
        "adapter": None,
        "revision": None,
    }
    assert asked(monkeypatch, command, *args) == usual
    flags = {"dtype": "bfloat16", "backend": "hf", "threads": "3", "compile": "off", "quantize": "int8"}
    named = [part for name, value in flags.items() for part in (f"--{name}", value)]
    assert asked(monkeypatch, command, *args, *named, "--exact") == usual | flags | {"threads": 3, "exact": True}


@pytest.mark.parametrize("command", ["bench", "calibrate"])
def test_a_target_without_a_drafter_is_reported_how_to_get_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(tmp_path) if arg == "PROMPTS" else arg for arg in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["blockdraft", command, *args, "--target", "some/model"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    told = capsys.readouterr().err
    assert "No drafter is known for some/model; add --drafter DIR" in told
    assert "blockdraft fit --target some/model --out DIR" in told


def test_the_remedy_for_a_gguf_file_fits_a_drafter_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="blockdraft fit --target model.gguf --out DIR"):
        need_drafter("model.gguf", None, "or none")


def test_a_broken_gguf_file_is_reported_before_a_drafter_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is GGUF of version 0"):
        drafter_or_lookup(str(tmp_path / "model.gguf"), None)


def test_the_bundled_target_by_name() -> None:
    need_drafter("bundled", None, "or none")  # which has one
    assert load_target_text("bundled").max_context == load_target_text().max_context


def test_a_folder_that_is_not_there_is_reported_before_a_drafter_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for absent in (str(tmp_path / "absent"), "absent"):
        monkeypatch.setattr(sys, "argv", ["blockdraft", "generate", "hi", "--target", absent])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        assert exit_info.value.code == 2
        assert f"There is no {absent}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "train", "chat"])
def test_help_is_wrapped_by_the_terminal_and_not_by_the_source(command: str) -> None:
    [told] = [one.help for one in cli.app.registered_commands if one.callback and one.callback.__name__ == command]
    assert told is not None and "\n\n" in told
    assert "\n" not in told.replace("\n\n", "")


def test_an_adapter_has_no_part_in_what_a_server_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blockdraft", "data", "x.jsonl", "--out", "x", "--adapter", "some/lora"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2 and "--adapter is for our own engine" in capsys.readouterr().err


def test_loading_that_takes_long_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: object, **__: object) -> SimpleNamespace:
        time.sleep(0.1)
        return SimpleNamespace(backend_reason=None, chosen_for=None)

    monkeypatch.setattr("blockdraft.targets.load_target", slow)
    load("target")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(timing, "TELL_SECONDS", 0.01)
    load("target")
    assert capsys.readouterr().err.startswith("Loading the target ... (0 s)\n")
