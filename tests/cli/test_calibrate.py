"""`blockdraft calibrate` on tiny random models."""

import json
import sys
from pathlib import Path

import pytest

from blockdraft import cli


def calibrate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["blockdraft", "calibrate", "--device", "cpu", *map(str, args)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return int(exit_info.value.code or 0), *capsys.readouterr()


def test_costs_are_measured_once_and_shown(
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr("blockdraft.engine.adaptive.stored_costs.REPEATS", 1)
    pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir, "--batch-size", 2)
    code, out, err = calibrate(capsys, monkeypatch, *pair)
    assert code == 0
    assert "R, chain of 7" in out and "R, tree of 64" in out and "2 rows: plain cycle" in err
    code, out, err = calibrate(capsys, monkeypatch, *pair, "--json")
    assert code == 0 and "--anew measures again" in err
    assert json.loads(out)["rows"] == [1, 2]
    assert "plain cycle" in calibrate(capsys, monkeypatch, *pair, "--anew")[2]


def test_a_target_needs_its_drafter(
    tiny_target_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = calibrate(capsys, monkeypatch, "--target", tiny_target_dir)
    assert (code, out) == (2, "")
    assert "add --drafter DIR" in err
