"""Accelerator, its process and its trackers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import tracking
from accelerate.utils import LoggerType

from blockdraft.errors import UsageError
from blockdraft_train import devices
from blockdraft_train.devices import begin_trackers, make_accelerator, track
from blockdraft_train.recipe import Recipe
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import find_variant

# In a process of its own: holes that other tests left in the heap would be counted.
FAULTS = """
import resource
import torch
from blockdraft_train.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)  # 64 MiB, above glibc's largest threshold for blocks of their own
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()
print(kept, min(faults() for _ in range(5)))  # a system short of memory takes some away at times
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switch")
def test_freed_memory_is_reused() -> None:
    answer = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=120)
    kept, faults = answer.stdout.split()
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    # 16,384 pages each of the five times where nothing is kept, unless pages are huge.
    assert int(faults) < 16_384


@pytest.mark.parametrize("device", ["abacus", "meta"])
def test_a_device_that_is_not_there_is_not_exchanged_for_another(device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"Device {device} is not usable here"):
        make_accelerator(Recipe(), tmp_path, device)


@pytest.mark.parametrize(("device", "message"), [("cuda:1", "CUDA_VISIBLE_DEVICES=1"), ("mps", "Give cpu")])
def test_devices_that_training_cannot_use(
    device: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_and_dtype", lambda name, dtype: (torch.device(name), dtype))
    with pytest.raises(UsageError, match=f"device is {device}; training takes the CPU or the first .*{message}"):
        make_accelerator(Recipe(), tmp_path, device)


def test_one_process_trains_in_one_arithmetic_after_the_other(fresh_accelerator: None, tmp_path: Path) -> None:
    for dtype, precision in (("float32", "no"), ("bfloat16", "bf16"), ("bfloat16", "bf16"), ("float32", "no")):
        assert make_accelerator(Recipe(dtype=dtype), tmp_path, "cpu").mixed_precision == precision


@pytest.mark.usefixtures("fresh_accelerator")
def test_trackers_receive_figures_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases, by a module of that name which notes what it is told."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(
        "calls, config = [], {}\n"
        "def init(**kwargs):\n    import wandb\n    wandb.init_args = kwargs\n    return wandb\n"
        "def log(values, step=None):\n    calls.append((step, values))\n"
        "def finish(): calls.append('finished')\n"
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
    assert wandb.calls == [(3, {"loss": 0.5, "accuracy/1": 0.25, "accuracy/3": 0.125}), "finished"]
    monkeypatch.delitem(sys.modules, "wandb")
