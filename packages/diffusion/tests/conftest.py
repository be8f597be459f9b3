"""Tiny block-diffusion models, converted from the tiny target."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from draft_models import target, tiny_block_dir
from training_fixtures import answered, parity

from blockdraft_diffusion.create import convert
from blockdraft_diffusion.folder import load_model
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_diffusion.settings import ConvertSettings

__all__ = ["answered", "parity", "target", "tiny_block_dir"]

MakeFolder: TypeAlias = Callable[..., Path]
MakeModel: TypeAlias = Callable[..., DiffusionModel]


@pytest.fixture(scope="session")
def folder_of(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Return a function that converts the tiny target, and returns the model's folder."""
    folders: dict[tuple[int, bool], Path] = {}

    def folder(block_size: int = 4, token_shift: bool = True) -> Path:
        key = block_size, token_shift
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("diffusion") / "model"
            convert(tiny_target_dir, folders[key], ConvertSettings(*key))
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def model_of(folder_of: MakeFolder) -> MakeModel:
    """Return a function that loads such a model on the CPU in float32."""

    def model(block_size: int = 4, token_shift: bool = True) -> DiffusionModel:
        return load_model(folder_of(4, token_shift), "cpu", block_size=block_size)

    return model


@pytest.fixture(autouse=True)
def _own_accelerator(fresh_accelerator: None) -> None:
    """Reset Accelerate's global state after each test."""
