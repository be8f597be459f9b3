from pathlib import Path

import pytest
import torch
from some_results import ARGUMENTS, PLAIN_TRIAL, trial

from blockdraft.evaluation.folder import write
from blockdraft.evaluation.pictures import require_pictures
from blockdraft.evaluation.results import Results, results


def test_pictures(found: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    require_pictures()
    write(tmp_path, found, with_pictures=True)
    for name in ("acceptance.png", "speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("methods", [["none"], ["none", "x"]])
def test_pictures_where_nothing_was_timed(tmp_path: Path, methods: list[str]) -> None:
    pytest.importorskip("matplotlib")
    trials = [trial(method, "a", None, 6.0, PLAIN_TRIAL) for method in methods]
    bare = results(trials, ARGUMENTS, torch.device("cpu"))
    write(tmp_path, bare, with_pictures=True)
    assert len(list(tmp_path.iterdir())) == 3
