"""Every kind of draft network, and the target, in MLX and JAX: the numbers of torch after any change of a state."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_targets import PACKAGES, load
from executor_parity import BATCHES, KINDS, assert_same_drafts, assert_same_scores

from blockdraft.drafters import load_drafter
from blockdraft.nn.torch_runner import TorchDraftRunner

LACKING = {"jax": ("dflash2", "medusa"), "mlx": ()}  # kinds that torch runs


@pytest.fixture(scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in PACKAGES])
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


@pytest.fixture(autouse=True)
def mixed(installed_plugin: Callable[..., None]) -> Iterator[None]:
    folder = Path(__file__).parents[1] / "drafters/new_kind"
    installed_plugin("mixed-layers", "[blockdraft.drafters]\nmixed = mixed_layers\n", folder)
    yield
    sys.modules.pop("mixed_layers", None)


@torch.no_grad()
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_torchs(
    backend: str, kind: str, batch: int, tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    fixture = {"dflash": "tiny_drafter_dir"}.get(kind, f"tiny_{kind}_dir")
    place = kind if kind == "mixed" else request.getfixturevalue(fixture)
    ours, theirs = (load_drafter(place, target=load(tiny_target_dir, name)) for name in (backend, "native"))
    runner: Any = ours.runner  # type: ignore[attr-defined]
    assert (type(runner) is TorchDraftRunner) == (kind in LACKING[backend])
    assert_same_drafts(ours, theirs, batch)


@torch.no_grad()
@pytest.mark.parametrize("batch", BATCHES)
def test_scores_of_the_target_are_torchs(backend: str, batch: int, tiny_target_dir: Path) -> None:
    assert_same_scores(*(load(tiny_target_dir, name) for name in (backend, "native")), batch)
