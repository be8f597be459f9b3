"""The log and the picture of a run."""

import sys
from pathlib import Path

import pytest

from blockdraft_train.progress import RunLog, draw_curves


def test_what_came_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 0)
    for step in (1, 2, 3):
        first.add({"step": step, "loss": 1.0 / step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    second = RunLog(tmp_path, 2)
    second.add({"step": 3, "loss": 0.5, "tau": 2.0})
    assert [line["step"] for line in RunLog(tmp_path, 9).lines] == [1, 2, 3]
    assert second.last("tau") == 2.0 and second.last("loss") == 0.5 and second.last("absent") is None


@pytest.mark.slow  # imports matplotlib
def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path, 0)
    log.add({"step": 1, "loss": 2.0, "accepted_length": None})
    log.add({"step": 2, "loss": 1.0, "held_out_loss": 1.5, "held_out_accuracy": [0.5, None], "tau": 1.5})
    assert draw_curves(log, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curves(log, tmp_path / "none.png")
