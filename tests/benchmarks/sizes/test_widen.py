"""Widened pairs have the outputs of the bundled one."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.sizes.widen import DRAFTER, TARGET, widen

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target

QUESTION = "A baker makes 4 trays of 6 rolls. She sells 9 rolls. How many rolls are left?"


@pytest.mark.slow
def test_a_wide_pair_says_the_same_with_the_same_tau(tmp_path: Path) -> None:
    found = []
    for folder in (TARGET.parent, tmp_path):
        if folder == tmp_path:
            widen(TARGET, tmp_path / "target", 2)
            widen(DRAFTER, tmp_path / "drafter", 2)
        target = load_target(folder / "target", dtype=torch.float32)
        engine = Engine(target, load_drafter(folder / "drafter", target=target), drafting=Drafting(None))
        [completion] = engine.generate([QUESTION], SamplingParams(40))
        found.append((completion.token_ids, completion.stats.committed))
    assert found[0] == found[1] and len(found[0][1]) < 30
    narrow, wide = (json.loads((f / "config.json").read_text())["hidden_size"] for f in (TARGET, tmp_path / "target"))
    assert wide == 2 * narrow


@pytest.mark.parametrize("drafter", ["tiny_drafter_dir", "tiny_dflash2_dir", "tiny_dspark_dir"])
def test_wide_drafters_draft_the_same(
    drafter: str, tmp_path: Path, tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    """Trees, which DSpark's confidence shapes, are the same too."""
    found = []
    for factor in (1, 2):
        sources = (tiny_target_dir, request.getfixturevalue(drafter))
        folders = [widen(source, tmp_path / f"{source.name}-{factor}", factor) for source in sources]
        target = load_target(folders[0], dtype=torch.float32)
        engine = Engine(target, load_drafter(folders[1], target=target), drafting=Drafting(tree_budget=6))
        chunks = engine.stream([5, 17, 3, 80, 44, 9], SamplingParams(24), trace=True)
        found.append([(chunk.step.tokens, chunk.step.parents) for chunk in chunks if chunk.step])
    assert found[0] == found[1] and found[0]


def test_a_factor_that_rounds_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3; choose a power of two"):
        widen(TARGET, tmp_path / "target", 3)
    assert not list(tmp_path.iterdir())
