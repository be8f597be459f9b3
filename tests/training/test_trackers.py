import sys
from pathlib import Path

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

from blockdraft.settings import read_settings
from blockdraft.training.devices import make_accelerator
from blockdraft.training.trackers import begin_trackers, track
from blockdraft.training.variant import find_variant

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def test_trackers_are_told_figures_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases, by a module of that name which notes what it is told."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(
        "told, config = [], {}\n"
        "def init(**kwargs):\n    import wandb\n    wandb.init_args = kwargs\n    return wandb\n"
        "def log(values, step=None):\n    told.append((step, values))\n"
        "def finish(): told.append('finished')\n"
    )
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = read_settings(find_variant("dflash").recipe_class, flags={"trackers": "wandb", "length": "40"})
    accelerator = make_accelerator(recipe, tmp_path, "cpu")
    begin_trackers(accelerator, "drafter", tmp_path, recipe)
    import wandb  # type: ignore[import-not-found]

    assert wandb.init_args["project"] == "blockdraft" and wandb.init_args["name"] == "drafter"
    assert wandb.config["length"] == 40 and wandb.config["objective"].startswith("{'")
    track(accelerator, {"step": 3, "loss": 0.5, "accuracy": [0.25, None, 0.125], "epoch": 1})
    accelerator.end_training()
    assert wandb.told == [(3, {"loss": 0.5, "accuracy/1": 0.25, "accuracy/3": 0.125}), "finished"]
    monkeypatch.delitem(sys.modules, "wandb")
