"""Test that a new kind of drafter is a package with entry points: `toy_kind/toy` is an autoregressive drafter
with its network, layout, training and checks. It is trained, resumed, exported, inspected, examined, loaded and run."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_fixtures import after_step, press_ctrl_c

from blockdraft import Engine, load_drafter, load_target
from blockdraft.formats import layouts
from blockdraft.types import Drafting
from blockdraft_tools.export import ExportFormat, convert, export
from blockdraft_tools.inspect import inspect
from blockdraft_train.data.documents import read_data
from blockdraft_train.devices import make_accelerator
from blockdraft_train.doctor.examine import examine
from blockdraft_train.job import TrainingJob
from blockdraft_train.progress import Progress
from blockdraft_train.settings_files import read_settings
from blockdraft_train.trainer import run_folder, train
from blockdraft_train.variant import find_variant
from blockdraft_train.variants import variant_names

FLAGS = {"block-size": "5", "length": "40", "batch": "4", "anchors": "6", "held-out": "6", "learning-rate": "1e-2"}
FLAGS |= {"eval-prompts": "2", "eval-tokens": "6", "eval-every": "10", "save-every": "2", "save-dtype": "float32"}
Run = Callable[..., list[dict[str, Any]]]


ENTRY_POINTS = """
[blockdraft.drafters]
toy = toy

[blockdraft_train.variants]
toy = toy.train

[blockdraft_train.checkers]
toy = toy.checks
"""


@pytest.fixture(autouse=True)
def toy(fresh_accelerator: None, installed_plugin: Callable[..., None]) -> Iterator[None]:
    """Install the toy as pip would."""
    installed_plugin("toy", ENTRY_POINTS, Path(__file__).parent / "toy_kind")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        del sys.modules[name]


@pytest.fixture
def run(tiny_target_dir: Path, tiny_data_dir: Path) -> Run:
    def call(
        out: Path,
        notes: list[str] | None = None,
        data: Path = tiny_data_dir,
        report: Callable[[str, int, int], None] = lambda stage, done, total: None,
        **changes: str,
    ) -> list[dict[str, Any]]:
        flags = FLAGS | {"trackers": ""} | changes
        recipe = read_settings(find_variant("toy").recipe_class, flags=flags)
        progress = Progress(report, notes.append if notes is not None else lambda text: None)
        accelerator = make_accelerator(recipe, run_folder(out), "cpu")
        target = load_target(tiny_target_dir, device="cpu")
        return train(TrainingJob("toy", target, read_data(data), out, recipe, accelerator, progress=progress))

    return call


def test_it_is_registered() -> None:
    assert "toy" in variant_names() and "toy" in layouts()
    with pytest.raises(ValueError, match="causal is unknown"):  # a field of the DFlash family
        read_settings(find_variant("toy").recipe_class, flags={"causal": "true"})


@pytest.mark.slow
def test_it_learns_the_targets_answers_and_decodes_them_losslessly(
    run: Run, tmp_path: Path, tiny_target_dir: Path, answered: Any
) -> None:
    target = load_target(tiny_target_dir)
    out = tmp_path / "drafter"
    changes = {"steps": "40", "objective": "decay=0.5,forward_kl=0.5", "held-out": "2", "eval-every": "0", "batch": "2"}
    lines = run(out, data=answered.folder, **changes)
    assert sum(line["loss"] for line in lines[-5:]) < 0.75 * sum(line["loss"] for line in lines[:5])
    assert 1 <= lines[-1]["tau"] <= 5 and len(lines[-1]["held_out_accuracy"]) == 4
    drafter = load_drafter(out, target=target)
    assert type(drafter).__name__ == "ToyDrafter" and drafter.block_size == 5
    drafted = Engine(target, drafter, max_batch_size=3, drafting=Drafting(None)).generate(
        answered.prompts, answered.params
    )
    assert [one.token_ids for one in drafted] == answered.answers
    assert sum(one.tau for one in drafted) > 1.15 * len(
        drafted
    )  # it was right often, and so observed several at a time


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_weights(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "whole", steps="6")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", report=after_step(4, press_ctrl_c), steps="6")
    notes: list[str] = []
    run(tmp_path / "stopped", notes, steps="6")
    assert any("Resuming from step 4" in note for note in notes)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def written(folder: Path, target: Any) -> tuple[Any, Any]:
    """Write a drafter with random weights to the folder; return its variant and network."""
    variant = find_variant("toy")(read_settings(find_variant("toy").recipe_class, flags=FLAGS))
    config = variant.config(target)
    network = variant.network(config)
    export(folder, ExportFormat("toy"), config, variant.saved(network.state_dict()), target)
    return variant, network.eval()


def test_training_pass_equals_draft_pass(parity: Callable[..., Any], tmp_path: Path, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    variant, network = written(tmp_path / "drafter", target)
    parity(variant, network, load_drafter(tmp_path / "drafter", target=target), target)


def test_other_layouts_refuse_it_by_name(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    written(tmp_path / "drafter", target)
    convert(tmp_path / "drafter", tmp_path / "copy", ExportFormat("toy"), target)
    assert load_drafter(tmp_path / "copy", target=target).block_size == 5
    for name in ("zlab", "speculators"):
        with pytest.raises(ValueError, match="ToyConfig is a configuration that .* cannot hold"):
            convert(tmp_path / "drafter", tmp_path / "other", ExportFormat(name), target)
    with pytest.raises(ValueError, match="is a DraftConfig; this layout holds toys"):
        convert(tiny_drafter_dir, tmp_path / "other", ExportFormat("toy"), target)


def test_it_is_inspected_and_examined(tmp_path: Path, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    written(tmp_path / "drafter", target)
    report = inspect(tmp_path / "drafter", tiny_target_dir)
    assert (report.layout, report.about["architecture"], report.conventions["draft_tokens"]) == ("toy", "ToyModel", 4)
    assert all(check.holds is not False for check in report.fits) and report.fits
    assert report.starts["vLLM"].reason == "it runs no toys"
    actual = examine(target, tmp_path / "drafter", ["a b c", "d e f"], max_new_tokens=12)
    assert actual.alike == 1.0 and actual.steps > 0  # decoding accepts what the drafter proposes on the finished text
    assert {one.fault for one in actual.tried} == {"", "target_layers"}
