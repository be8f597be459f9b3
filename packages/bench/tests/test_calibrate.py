"""`blockdraft calibrate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_costs_are_measured_once_and_shown(
    tiny_target_dir: Path, tiny_drafter_dir: Path, own_cache: Path, blockdraft: Run, other_work: dict[str, float | None]
) -> None:
    other_work["cores"] = 1.0
    words = ("calibrate", "--device", "cpu", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
    words += ("--batch-size", 2)
    assert (
        "Not stored, since other programs used 1.0 cores meanwhile; calibrate while nothing else runs."
        in blockdraft(*words)[2]
    )
    other_work["cores"] = None
    code, out, err = blockdraft(*words)
    assert code == 0
    assert "R, chain of 7" in out and "R, tree of 64" in out and "batch size 2: plain step" in err
    code, out, err = blockdraft(*words, "--json")
    assert code == 0 and "--anew measures again" in err
    assert json.loads(out)["batch_sizes"] == [1, 2]
    assert "plain step" in blockdraft(*words, "--anew")[2]


def test_calibrating_a_target_without_a_bundled_drafter_takes_lookup(tiny_target_dir: Path, blockdraft: Run) -> None:
    code, out, err = blockdraft("calibrate", "--anew", "--device", "cpu", "--target", tiny_target_dir)
    assert code == 0 and "R, chain of" in out and "batch size 1: plain step" in err
