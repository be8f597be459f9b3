"""MLX and JAX refuse what they do not support with a remedy, or log a warning; nothing falls back silently."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import write_model

from blockdraft.drafters import drafter_of, load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import NotCovered, backends, load_target
from blockdraft.types import LoadOptions, SamplingParams

PACKAGES = {"mlx": "mlx_lm", "jax": "jax.numpy"}  # tests/jax is a package `jax` without it
EACH = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in PACKAGES]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("mlx", r"mlx-lm is not installed; pip install mlx-lm"),
        ("jax", r"JAX is not installed; pip install jax, and on a TPU 'jax\[tpu\]'"),
    ],
)
def test_a_missing_package_is_named(
    backend: str, remedy: str, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[backend].partition(".")[0], None)
    with pytest.raises(ValueError, match=f"The {backend} backend cannot run .*: {remedy}"):
        load_target(tiny_target_dir, backend=backend)
    assert load_target(tiny_target_dir).backend == "native"


@pytest.mark.parametrize("backend", EACH, indirect=True)
@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"exact": True}, {"compile": "on"}])
def test_options_of_other_backends(backend: str, option: dict[str, Any], tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=f"The {backend} backend cannot run .*: it has no {next(iter(option))}"):
        load_target(tiny_target_dir, backend=backend, **option)


@pytest.mark.parametrize(
    ("backend", "option", "message"),
    [
        pytest.param(name, option, message, marks=getattr(pytest.mark, name))
        for name, option, message in [
            ("mlx", {"quantize": "int4"}, "; mlx_lm.convert --quantize writes a quantized model"),
            ("mlx", {"adapter": "adapter"}, "it has no adapter"),
            ("mlx", {"device": torch.device("cuda")}, "and the device is cuda"),
            ("jax", {"dtype": torch.float16}, "TPUs have no float16; choose the dtype bfloat16 or float32"),
            ("jax", {"device": torch.device("cuda")}, "the device is cuda; choose the device cpu"),
        ]
    ],
    indirect=["backend"],
)
def test_options_that_one_backend_lacks(
    backend: str, option: dict[str, Any], message: str, tiny_target_dir: Path
) -> None:
    options = LoadOptions(**{"dtype": torch.float32, "device": torch.device("cpu"), **option})
    with pytest.raises(NotCovered, match=message):
        backends()[backend].load(tiny_target_dir, options)


@pytest.mark.parametrize("backend", EACH, indirect=True)
def test_files_that_it_does_not_read(backend: str, tmp_path: Path, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=f"The {backend} backend cannot run .*: it reads no GGUF files"):
        load_target(tmp_path / "model.gguf", backend=backend)
    config = json.loads((tiny_target_dir / "config.json").read_text(encoding="utf-8")) | {"model_type": "opt"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    unknown = "mlx-lm .* does not know the model" if backend == "mlx" else "opt is none of its families"
    with pytest.raises(
        ValueError, match=f"The {backend} backend cannot run .*: {unknown}.* Use another backend, or auto"
    ):
        load_target(tmp_path, backend=backend)


@pytest.mark.jax
def test_layers_that_jax_lacks(tmp_path: Path) -> None:
    pytest.importorskip("jax.numpy")
    with pytest.raises(ValueError, match="The jax backend cannot run .*: it has routed experts"):
        load_target(write_model("qwen3_moe", tmp_path), backend="jax")


@pytest.mark.mlx
def test_states_that_mlx_cannot_cut(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    with pytest.raises(ValueError, match="a layer keeps a ArraysCache of mlx-lm, which cannot be cut"):
        load_target(write_model("nemotron_h", tmp_path), backend="mlx")


@pytest.mark.parametrize("backend", EACH, indirect=True)
def test_a_drafter_that_torch_runs_drafts_with_a_warning(
    backend: str, tiny_target_dir: Path, tiny_medusa_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend=backend)
    plain = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")
    network: Any = load_drafter(tiny_medusa_dir, target=plain).network  # type: ignore[attr-defined]
    network.description = replace(network.description, torch_only="recurrent layers")
    [completion] = Engine(target, drafter_of(network, target)).generate([[5, 6]], SamplingParams(8))
    assert any(completion.stats.drafted)
    assert f"The drafter is not run by {backend.upper()}: it does not know recurrent layers" in caplog.text


@pytest.mark.parametrize("backend", EACH, indirect=True)
def test_a_drafter_that_the_backend_runs_has_no_warning(
    backend: str, tiny_target_dir: Path, tiny_dspark_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_drafter(
            tiny_dspark_dir, target=load_target(tiny_target_dir, dtype="float32", device="cpu", backend=backend)
        )
    assert not caplog.text


@pytest.mark.mlx
def test_on_apple_silicon_mlx_is_the_first_choice(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    """The next backend takes over models and options that MLX does not support, and gives the reason."""
    pytest.importorskip("mlx_lm")
    module = backends()["mlx"]
    constants(module, RANK=-1)
    monkeypatch.setattr(module.MLXTarget, "chosen_for", "this machine has Apple silicon")
    chosen = load_target(tiny_target_dir, dtype="float32", device="cpu")
    assert (chosen.backend, chosen.backend_reason) == ("mlx", None) and chosen.chosen_for
    other = load_target(
        write_model("qwen3_moe", tmp_path), dtype="float32", device="cpu"
    )  # without the keys that mlx-lm wants
    assert other.backend == "native" and "cannot run its files (TypeError" in str(other.backend_reason)
    few = load_target(tiny_target_dir, dtype="float32", device="cpu", quantize="int8")
    assert few.backend == "native" and "it has no quantize" in str(few.backend_reason)
