"""Fixtures of targets and draft models."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.targets import Target, load_target
from blockdraft_diffusion.create import convert
from blockdraft_diffusion.settings import ConvertSettings


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="session")
def tiny_block_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Block-diffusion model with blocks of 5 tokens and the weights of `tiny_target_dir`, not trained for blocks."""
    folder = tmp_path_factory.mktemp("tiny") / "blocks"
    convert(tiny_target_dir, folder, ConvertSettings(block_size=5))
    return folder


@pytest.fixture(scope="session")
def tiny_lm_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Language model that agrees with `tiny_target_dir` often, but not always: its weights with noise."""
    folder = tmp_path_factory.mktemp("tiny") / "lm"
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    for file in tiny_target_dir.iterdir():
        if file.suffix == ".safetensors":
            tensors = {n: t + 0.03 * torch.randn(t.shape, generator=generator) for n, t in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny_combination(tiny_drafter_dir: Path) -> str:
    return f"lookup+{tiny_drafter_dir}"
