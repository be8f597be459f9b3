"""`blockdraft inspect`: JSON for programs, tables for people, and an exit code that tells whether it fits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from standard_stream import ESCAPES

from blockdraft.formats import zlab
from blockdraft.formats.starting import Start
from blockdraft_tools.cli.inspect import show
from blockdraft_tools.inspect import Check, Report

Run = Callable[..., tuple[int, str, str]]


def test_json(blockdraft: Run, tiny_drafter_dir: Path, tiny_target_dir: Path) -> None:
    for more in ((), ("--json",)):
        code, out, _ = blockdraft("inspect", tiny_drafter_dir, "--target", tiny_target_dir, *more)
        report = json.loads(out)
        assert code == 0 and report["what"] == "drafter" and report["conventions"]["block_size"] == 8
        assert report["starts"]["vLLM"]["line"].startswith("vllm serve")
        assert {"name": "layers", "holds": True, "detail": "3 here, 3 in the target"} in report["fits"]


def test_tables(blockdraft: Run, tiny_drafter_dir: Path, tiny_target_dir: Path) -> None:
    code, out, _ = blockdraft("inspect", tiny_drafter_dir, "--target", tiny_target_dir, terminal=True)
    shown = ESCAPES.sub("", out)
    for line in ("zlab: ", "conventions", "layers: 0", "causal in block", "mask token: id", "fits", "not known"):
        assert line in shown, line
    assert code == 0 and f"blockdraft serve --target {tiny_target_dir} --drafter {tiny_drafter_dir}" in shown


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check("mask token", True, "3 is '[/INST]'")
    start = Start(None, "it reads [no] such file")
    show(Report("a[bold]/b", "drafter", "zlab", {"mask_token": "[mask]"}, fits=(check,), starts={"vLLM": start}))
    shown = capsys.readouterr().out
    for message in ("zlab: a[bold]/b", "[mask]", "3 is '[/INST]'", "vLLM: it reads [no] such file"):
        assert message in shown, message


def test_misfits_are_reported(blockdraft: Run, tiny_drafter_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=4), tensors)
    code, out, _ = blockdraft("inspect", tmp_path / "deep", "--target", tiny_target_dir)
    wrong = [check for check in json.loads(out)["fits"] if check["holds"] is False]
    assert code == 1 and [check["detail"] for check in wrong] == ["4 here, 3 in the target"]
    code, _, err = blockdraft("inspect", tmp_path)
    assert code == 2 and "did you mean" in err
