"""Choice of the backend: files of the folder, asked by rank."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft import machine, targets
from blockdraft.errors import UsageError
from blockdraft.targets import NotCovered, as_target, load_target
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.native import NativeTarget
from blockdraft.types import LoadOptions


def use(monkeypatch: pytest.MonkeyPatch, **ranks: int | None) -> list[tuple[str, LoadOptions]]:
    """Add backends of these ranks that know no model. Return the list of calls to them."""
    asked: list[tuple[str, LoadOptions]] = []

    def made(name: str, rank: int | None) -> SimpleNamespace:
        def load(path: Path, options: LoadOptions) -> Any:
            asked.append((name, options))
            raise NotCovered(f"{name} does not know it")

        return SimpleNamespace(RANK=rank, load=load)

    known = targets.backends() | {name: made(name, rank) for name, rank in ranks.items()}  # type: ignore[operator]
    monkeypatch.setattr(targets, "backends", lambda: known)
    return asked


def test_auto_asks_those_with_a_rank_the_lowest_first(monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path) -> None:
    asked = use(monkeypatch, late=7, early=-2, native=3, hf=4, never=None)
    with pytest.raises(ValueError, match=f"No backend runs {tiny_target_dir}: early does not know it"):
        load_target(tiny_target_dir)
    assert [name for name, _ in asked] == ["early", "native", "hf", "late"]


def test_why_a_better_backend_did_not_run_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path
) -> None:
    use(monkeypatch, first=-2, second=-1)
    target = load_target(tiny_target_dir)
    assert isinstance(target, NativeTarget) and target.backend_reason == "first does not know it"
    assert load_target(tiny_target_dir, backend="native").backend_reason is None


def test_a_backend_that_was_asked_for_runs_it_or_nobody(monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path) -> None:
    asked = use(monkeypatch, odd=None)
    assert isinstance(load_target(tiny_target_dir, backend="hf"), HFTarget) and not asked
    with pytest.raises(ValueError, match="The odd backend cannot run .*: odd does not know it. Use another backend"):
        load_target(tiny_target_dir, dtype="float16", device="cpu", backend="odd", compile="off", quantize="int8")  # type: ignore[arg-type]
    [(_, options)] = asked
    assert options == LoadOptions(dtype="float16", device="cpu", backend="odd", compile="off", quantize="int8")
    with pytest.raises(
        ValueError, match=r"backend is 'even'; use one of \['auto', 'hf', 'jax', 'mlx', 'native', 'odd'\]"
    ):
        load_target(tiny_target_dir, backend="even")  # type: ignore[arg-type]


def test_weights_are_not_left_unrounded_for_want_of_a_backend(
    monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path
) -> None:
    asked = use(monkeypatch, native=0)
    with pytest.raises(ValueError, match="The native backend cannot run .* Use other weights"):
        load_target(tiny_target_dir, quantize="int8")
    assert [name for name, _ in asked] == ["native"]


def test_models_of_transformers_and_targets_are_targets(tiny_target_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir).train()
    target = as_target(model)
    assert target.vocab_size == model.config.vocab_size and not model.training
    assert target.model is model
    native = load_target(tiny_target_dir, backend="native")
    assert as_target(native) is native and native.model is None
    with pytest.raises(UsageError, match="The target is a str; give a model of transformers or use load_target"):
        as_target("folder")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "instructions", "expected", "message"),
    [
        ("float32", True, torch.float32, ""),
        ("bfloat16", True, torch.bfloat16, ""),
        ("bfloat16", False, torch.float32, "is in bfloat16, for which this processor has no instructions"),
        ("float16", True, torch.float32, "is in float16, for which this processor has no instructions"),
        (None, True, torch.float32, ""),
    ],
)
def test_the_dtype_of_the_checkpoint_is_the_default(
    named: str | None,
    instructions: bool,
    expected: torch.dtype,
    message: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    constants: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    raw = json.loads((folder / "config.json").read_text()) | {"dtype": named}
    (folder / "config.json").write_text(json.dumps(raw))
    constants(machine, BFLOAT16_FLAGS=machine.processor_flags() if instructions else frozenset())
    for backend in ("native", "hf"):
        caplog.clear()
        assert load_target(folder, device="cpu", backend=backend, compile="off").dtype == expected
        assert message in caplog.text and bool(message) == bool(caplog.text)
    caplog.clear()
    assert load_target(folder, dtype="float16", device="cpu", backend="hf").dtype == torch.float16 and not caplog.text
    rounded = load_target(folder, device="cpu", quantize="int8")
    assert rounded.dtype == torch.float32 and "for which" not in caplog.text
