"""The comparison of drafters on tiny models: results, resuming, and the page."""

from pathlib import Path

import pytest
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals.__main__ import Measured, arguments, methods_of, page

RECIPE = """
[all]
length = 64
batch = 4
held_out = 4
trackers = []
eval_every = 0
eval_prompts = 0
[dflash]
block_size = 4
layers = 1
target_layers = 2
"""


@pytest.mark.slow
@pytest.mark.long
def test_drafters_are_trained_and_measured_once(
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "maths.jsonl").write_text('{"prompt": "What is 2 plus 3?"}\n{"prompt": "Count."}\n')
    out = tmp_path / "out"
    words = ["--target", str(tiny_target_dir), "--data", str(tiny_data_dir), "--out", str(out)]
    words += ["--recipe", str(tmp_path / "recipe.toml"), "--prompts", str(tmp_path / "maths.jsonl"), "--seeds", "1"]
    words += ["--kinds", "dflash,lookup", "--steps", "2", "--max-new-tokens", "8", "--repeats", "1"]
    words += ["--methods", "chain:8,tree:4", "--threads", "1", "--temperatures", "0"]
    rivals.main(words)
    text = (out / "rivals.md").read_text()
    assert "| DFlash | chain:4 |" in text and "| lookup | tree:4 |" in text
    monkeypatch.setattr("subprocess.run", None)  # nothing is left to run
    rivals.main(words)
    assert (out / "rivals.md").read_text() == text
    with pytest.raises(SystemExit):
        rivals.main([*words, "--steps", "3"])
    assert "other steps; choose another --out" in capsys.readouterr().err


def test_chains_are_cut_to_the_block_size(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(["--data", "d", "--prompts", "p", "--methods", "chain:4,chain:8,chain:9,tree:9"])
    assert methods_of("medusa", given) == ["chain:4", "chain:6", "tree:9"]
    assert methods_of("dspark", given) == methods_of("dflash", given) == ["chain:4", "chain:8", "tree:9"]
    with pytest.raises(SystemExit):
        arguments(["--data", "d", "--prompts", "p", "--kinds", "eagle"])
    assert "'eagle' is unknown; there are dflash, " in capsys.readouterr().err


def test_the_page_compares_the_fastest_method_of_each_kind(tmp_path: Path) -> None:
    def row(kind: str, seed: int, method: str, speedup: float) -> Measured:
        figures = {"tau": 2 * speedup, "speedup": speedup, "step_cost": 2.0, "acceptance_by_position": [0.5]}
        return Measured(kind, seed, 0.0, "maths", method, figures)

    rows = [
        row("dflash", seed, method, speed) for seed in (0, 1) for method, speed in (("chain:4", 2.0), ("tree:4", 1.0))
    ]
    rows += [row("eagle3", 0, "chain:4", 1.0), row("eagle3", 1, "chain:4", 3.0)]
    text = page(rows, tmp_path)
    assert "| DFlash | chain:4 | 2.00 (2.00 to 2.00) | 4.00 | 2.00 | 1.00 (1.00 to 1.00) |" in text
    assert "| EAGLE-3 | chain:4 | 2.00 (1.00 to 3.00) | 4.00 | 2.00 | 1.00 (0.50 to 1.50) |" in text
