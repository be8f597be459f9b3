"""Killed fits: resumed, they end with the same drafter, bit for bit."""

import json
from pathlib import Path

import pytest

from benchmarks.stranger.kills import killed


# Of the parts of a fit, shorter tests say so: `tools/fit/test_steps.py`, `training/test_trainer.py`.
@pytest.mark.slow
@pytest.mark.long
def test_killed_fits_end_with_the_same_weights(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i} the inn"}) + "\n" for i in range(120)))
    options = ["--target", str(tiny_target_dir), "--device", "cpu", "--data", str(prompts), "--variant", "dflash"]
    options += ["--answers", "40", "--steps", "12", "--max-new-tokens", "16", "--hours", "0.1"]
    fits, differing = killed(options, tmp_path, kills=2)
    assert fits >= 1 and differing == 0
