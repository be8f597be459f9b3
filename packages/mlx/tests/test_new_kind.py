"""A new kind of draft network, declared in one file of the tests, drafts in MLX without a line here."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from node_logits import logits_of

from blockdraft import Engine, load_drafter, load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_mlx.draft_runner import MLXDraftRunner

pytest.importorskip("mlx.core", reason="MLX is not installed: make test-mlx")
pytestmark = pytest.mark.mlx

FOLDER = Path(__file__).parents[3] / "tests/drafters/new_kind"


@pytest.fixture(autouse=True)
def kind(installed_plugin: Callable[..., None]) -> Iterator[None]:
    installed_plugin("mixed-layers", "[blockdraft.drafters]\nmixed = mixed_layers\n", FOLDER)
    yield
    sys.modules.pop("mixed_layers", None)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3, 7])
def test_its_trees_have_torchs_logits(window: int | None, tiny_target_dir: Path) -> None:
    outputs = []
    for backend, how in (("mlx", {}), ("native", {"compile": "off"})):
        drafter = load_drafter("mixed", target=load_target(tiny_target_dir, dtype="float32", backend=backend, **how))  # type: ignore[arg-type]
        assert isinstance(drafter.runner, MLXDraftRunner) == (backend == "mlx")  # type: ignore[attr-defined]
        outputs.append(logits_of(drafter.runner, drafter.network, window))  # type: ignore[attr-defined]
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("drafting", [Drafting(5), Drafting(tree_budget=12)])
def test_it_drafts_losslessly(drafting: Drafting, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, dtype="float32", backend="mlx")
    prompts, params = [[7, 60, 33], [5], [9, 8, 7, 6, 5, 4]], SamplingParams(14, ignore_eos=True)
    engines = Engine(target, load_drafter("mixed", target=target), 3, drafting), Engine(target)
    outputs = [[done.token_ids for done in engine.generate(prompts, params)] for engine in engines]
    assert outputs[0] == outputs[1]


def test_heads_run_too(tiny_target_dir: Path, tiny_medusa_dir: Path) -> None:
    target = load_target(tiny_target_dir, dtype="float32", backend="mlx")
    drafter = load_drafter(tiny_medusa_dir, target=target)
    assert isinstance(drafter.runner, MLXDraftRunner)  # type: ignore[attr-defined]
    engines = Engine(target, drafter, drafting=Drafting(None)), Engine(target)
    outputs = [engine.generate([[7, 60, 33]], SamplingParams(14))[0].token_ids for engine in engines]
    assert outputs[0] == outputs[1]
