"""Every kind of draft network, and the target, on every executor: the numbers of torch after any change of a state."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_forwards import Recorder
from executor_parity import BATCHES, KINDS, assert_same_drafts, assert_same_scores

from blockdraft import load_drafter, load_target
from blockdraft.kernels.cpu.compiled_decoder import CompiledDecoder
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.kernels.cuda.captured_decoder import CapturedDecoder
from blockdraft.kernels.cuda.captured_runner import CapturedDraftRunner
from blockdraft.nn.torch_decoder import TorchDecoder
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets.exact import ExactDecoder

RUNNERS = {"torch": TorchDraftRunner, "compiled": CompiledDraftRunner, "captured": CapturedDraftRunner}
DECODERS = {"torch": TorchDecoder, "compiled": CompiledDecoder, "captured": CapturedDecoder, "exact": ExactDecoder}


def target_on(executor: str, folder: Path) -> Any:
    how = {"compile": "on" if executor == "compiled" else "off", "exact": executor == "exact"}
    target: Any = load_target(folder, dtype="float32", device="cpu", backend="native", **how)
    if executor == "captured":
        target.capture(Recorder())
    assert type(target.executor) is DECODERS[executor]
    return target


@pytest.fixture
def load(
    request: pytest.FixtureRequest, tiny_target_dir: Path, installed_plugin: Callable[..., None]
) -> Iterator[Callable[[str, str], Any]]:
    """Return a function that loads the drafter of a kind for an executor."""
    folder = Path(__file__).parent / "new_kind"
    installed_plugin("mixed-layers", "[blockdraft.drafters]\nmixed = mixed_layers\n", folder)

    def loaded(kind: str, executor: str) -> Any:
        fixture = {"dflash": "tiny_drafter_dir"}.get(kind, f"tiny_{kind}_dir")
        place = kind if kind == "mixed" else request.getfixturevalue(fixture)
        return load_drafter(place, target=target_on(executor, tiny_target_dir))

    yield loaded
    sys.modules.pop("mixed_layers", None)


@torch.no_grad()
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("executor", ["compiled", "captured"])
def test_drafts_are_torchs(executor: str, kind: str, batch: int, load: Callable[[str, str], Any]) -> None:
    ours, theirs = load(kind, executor), load(kind, "torch")
    without = (executor, kind) == ("captured", "medusa")  # heads are not captured
    assert type(ours.runner) is (TorchDraftRunner if without else RUNNERS[executor])
    assert ours.state_bytes(2, 50) == theirs.state_bytes(2, 50)
    assert_same_drafts(ours, theirs, batch)


@torch.no_grad()
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("executor", ["compiled", "captured", "exact"])
def test_scores_of_the_target_are_torchs(executor: str, batch: int, tiny_target_dir: Path) -> None:
    ours, theirs = target_on(executor, tiny_target_dir), target_on("torch", tiny_target_dir)
    assert ours.cache_bytes(2, 50) == theirs.cache_bytes(2, 50)
    assert_same_scores(ours, theirs, batch)
