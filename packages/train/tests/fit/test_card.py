"""What a drafter's folder says about it."""

import json
import shutil
from pathlib import Path

import pytest

from blockdraft.formats import DrafterTarget
from blockdraft.targets import load_target
from blockdraft_tools.export import ExportFormat, convert
from blockdraft_train.fit.card import engines, usage
from blockdraft_train.fit.steps import Where


@pytest.mark.parametrize("last", [False, True])
def test_an_export_that_would_be_refused_is_not_advised(tmp_path: Path, tiny_drafter_dir: Path, last: bool) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_drafter_dir, out)
    config = json.loads((out / "config.json").read_text())
    target_layers = config["dflash_config"]["target_layer_ids"]
    target_layers[-1] = config["num_target_layers"] - 1 if last else config["num_target_layers"] - 2
    config.pop("target_layer_ids", None)  # the same once more
    (out / "config.json").write_text(json.dumps(config))
    advised = any(line.startswith("blockdraft export") for line in usage(Where(out, "some/model")))
    assert advised is not last


def test_other_engines_are_not_said_to_load_a_gguf_file(tmp_path: Path, tiny_drafter_dir: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_drafter_dir, out)
    assert not any(line.startswith("blockdraft export") for line in usage(Where(out, "m.gguf")))
    told = " ".join(engines(Where(out, "m.gguf")).values())
    assert "m.gguf" not in told and "TARGET" in told


def test_a_drafter_that_names_no_target_is_not_started_elsewhere(
    tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    """As of part of the vocabulary for a GGUF file."""
    inside = tmp_path / "inside"
    shutil.copytree(tiny_drafter_dir, inside)
    config = json.loads((inside / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"][-1] = config["num_target_layers"] - 2
    (inside / "config.json").write_text(json.dumps(config))
    target = load_target(tiny_target_dir, device="cpu")
    for name, started in (("some/model", True), (None, False)):
        out = tmp_path / str(started)
        convert(inside, out, ExportFormat("speculators", DrafterTarget(name)), target)
        assert bool(engines(Where(out, name or "m.gguf"))) == started
        assert not any(line.startswith("blockdraft export") for line in usage(Where(out, name or "m.gguf")))


def test_the_export_is_for_the_same_model(tmp_path: Path, tiny_drafter_dir: Path) -> None:
    where = Where(tmp_path / "out", "some/model", "bfloat16", "cpu", "hf", "some/lora", "v2")
    shutil.copytree(tiny_drafter_dir, where.out)
    told = "--target some/model --adapter some/lora --revision v2 --format"
    assert told in usage(where)[-1]
    assert f"{where.out} --format" in usage(Where(where.out, None, device="cpu"))[-1]  # of the bundled model
