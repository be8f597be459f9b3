"""Training of heads on the target's last hidden state, and decoding with the result."""

from pathlib import Path
from typing import Any

import pytest

from blockdraft import Engine, load_drafter, load_target
from blockdraft.types import Drafting
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.hidden_states import plan_hidden_states
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.devices import make_accelerator
from blockdraft_train.job import TrainingJob
from blockdraft_train.settings_files import read_settings
from blockdraft_train.trainer import run_folder, train
from blockdraft_train.variant import find_variant

FLAGS = {"length": "40", "batch": "4", "anchors": "12", "held-out": "2", "learning-rate": "1e-2", "steps": "60"}
FLAGS |= {"eval-prompts": "2", "eval-tokens": "6", "eval-every": "0", "save-every": "0", "save-dtype": "float32"}
FLAGS |= {"objective": "decay=0.5,forward_kl=0.5", "trackers": ""}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("name", ["medusa", "mtp"])
def test_heads_learn_the_targets_answers_and_decode_them_losslessly(
    name: str, tmp_path: Path, tiny_target_dir: Path, answered: Any
) -> None:
    """Trained from hidden states on disk, where the target's last hidden state is both the input and the teacher."""
    target, data = load_target(tiny_target_dir, device="cpu"), read_data(answered.folder)
    plan_hidden_states(tmp_path / "hidden_states", target, data, (target.num_layers,), HiddenStateSettings()).write()
    kind, out = find_variant(name).recipe_class, tmp_path / "drafter"
    recipe = read_settings(kind, flags=FLAGS | {"hidden_states": str(tmp_path / "hidden_states")})
    lines = train(TrainingJob(name, target, data, out, recipe, make_accelerator(recipe, run_folder(out), "cpu")))
    assert sum(line["loss"] for line in lines[-5:]) < 0.75 * sum(line["loss"] for line in lines[:5])
    assert len(lines[-1]["held_out_accuracy"]) == 3

    drafter = load_drafter(out, target=target)
    assert type(drafter).__name__.lower() == f"{name}drafter"
    for drafting in (Drafting(None), Drafting(tree_budget=8)):
        drafted = Engine(target, drafter, max_batch_size=3, drafting=drafting).generate(
            answered.prompts, answered.params
        )
        assert [one.token_ids for one in drafted] == answered.answers
        assert sum(one.tau for one in drafted) > 1.25 * len(drafted)  # of draft tokens at random, hardly any stand
