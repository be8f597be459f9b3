"""`blockdraft inspect`: JSON for programs, tables for people, and an exit code that tells whether it fits."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft import cli
from blockdraft.cli.inspect import show
from blockdraft.formats import zlab
from blockdraft.formats.starting import Start
from blockdraft.tools.inspect import Check, Report

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*args: object) -> int:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_info:
            patch.setattr(sys, "argv", ["blockdraft", "inspect", *map(str, args)])
            cli.main()
        return int(exit_info.value.code or 0)

    return call


def test_json(run: Run, tiny_drafter_dir: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((), ("--json",)):
        assert run(tiny_drafter_dir, "--target", tiny_target_dir, *args) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["what"] == "drafter" and found["conventions"]["block_size"] == 8
        assert found["starts"]["vLLM"]["line"].startswith("vllm serve")
        assert {"name": "layers", "holds": True, "detail": "3 here, 3 in the target"} in found["fits"]


def test_tables(
    run: Run,
    tiny_drafter_dir: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    assert run(tiny_drafter_dir, "--target", tiny_target_dir) == 0
    shown = capsys.readouterr().out
    for line in (
        "zlab: ",
        "conventions",
        "layers: 0",
        "causal in block no",
        "mask token: id",
        "fits",
        "not known",
    ):
        assert line in shown, line
    assert f"blockdraft serve --target {tiny_target_dir} --drafter {tiny_drafter_dir}" in shown


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check("mask token", True, "3 is '[/INST]'")
    start = Start(None, "it reads [no] such file")
    show(Report("a[bold]/b", "drafter", "zlab", {"mask_token": "[mask]"}, fits=(check,), starts={"vLLM": start}))
    shown = capsys.readouterr().out
    for said in ("zlab: a[bold]/b", "[mask]", "3 is '[/INST]'", "vLLM: it reads [no] such file"):
        assert said in shown, said


def test_what_does_not_fit(
    run: Run, tiny_drafter_dir: Path, tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=4), tensors)
    assert run(tmp_path / "deep", "--target", tiny_target_dir) == 1
    wrong = [check for check in json.loads(capsys.readouterr().out)["fits"] if check["holds"] is False]
    assert [check["detail"] for check in wrong] == ["4 here, 3 in the target"]
    assert run(tmp_path) == 2
    assert "did you mean" in capsys.readouterr().err
