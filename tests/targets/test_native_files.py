"""Loading of weights: once into memory, and the second time from the cache folder."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.decode.proposal import chain
from blockdraft.formats.stored import MadeTensor, StoredTensor, TensorFiles
from blockdraft.kernels.cpu import weight_cache
from blockdraft.kernels.cpu.build import build
from blockdraft.targets import Target, load_target, target_fingerprint, weights

WAYS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantize": "int8"},
    {"dtype": "float32", "quantize": "int4"},
]


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]) -> Path:
    """Cache weights of any size in a folder of the test's own, and return it."""
    for way in WAYS:
        dtype = getattr(torch, way["dtype"])
        build(dtype, dtype, 8, "quantize" in way, dtype).library()  # in the cache folder that the tests share
    constants(weight_cache, MIN_BYTES=1)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def numbers(target: Target) -> Tensor:
    proposal = chain(torch.arange(20, 30)[None])
    return target.forward(proposal.tokens, proposal.parents, target.new_cache(1, 16)).logits


def load(folder: Path, **way: Any) -> Target:
    return load_target(folder, device="cpu", backend="native", compile="on", **way)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_the_second_start_maps_what_the_first_has_packed(
    tiny_target_dir: Path, keeping: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    monkeypatch.setenv(weight_cache.SWITCH, "0")
    plain = load(tiny_target_dir, **way)
    assert not keeping.exists()
    monkeypatch.delenv(weight_cache.SWITCH)
    first = load(tiny_target_dir, **way)
    assert len(list(keeping.glob("*.weights"))) == 1
    second = load(tiny_target_dir, **way)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or maps.read_text().count(str(keeping)) > 1  # both targets have the file mapped
    for other in (first, second):
        assert torch.equal(numbers(other), numbers(plain)) and other.running == plain.running
        assert target_fingerprint(other) == target_fingerprint(plain)
        assert other.source_fingerprint == plain.source_fingerprint is not None
        for (name, mine), (_, theirs) in zip(other.named_weights(), plain.named_weights(), strict=True):
            assert torch.equal(mine, theirs), name


def test_ways_of_loading_are_kept_apart(tiny_target_dir: Path, keeping: Path) -> None:
    for number, way in enumerate(WAYS):
        load(tiny_target_dir, **way)
        assert len(list(keeping.glob("*.weights"))) == number + 1


def test_another_configuration_is_another_decoder(tiny_target_dir: Path, keeping: Path, tmp_path: Path) -> None:
    """An untied head is packed apart from the embedding."""
    weights = load_file(tiny_target_dir / "model.safetensors")
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    path, actual = tmp_path / "target" / "config.json", []
    for tied in (True, False):
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": tied}))
        actual.append(numbers(load(tmp_path / "target")))
    assert torch.equal(*actual)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize("keep", [False, True])
def test_no_tensor_of_the_checkpoint_outlives_its_reading(
    tiny_target_dir: Path,
    tmp_path: Path,
    keeping: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: dict[str, Any],
    keep: bool,
) -> None:
    own = shutil.copytree(tiny_target_dir, tmp_path / "own")  # targets of other tests may map the shared one
    monkeypatch.setenv(weight_cache.SWITCH, str(int(keep)))
    matrices, most, kind = [], [0], weights.open_folder

    def watched(path: Path) -> TensorFiles:
        def read(one: StoredTensor) -> Tensor:
            actual = one.tensor()
            if actual.ndim == 2:
                matrices.append(weakref.ref(actual.untyped_storage()))
            most[0] = max(most[0], sum(ref() is not None for ref in matrices))
            return actual

        opened = kind(path)
        return TensorFiles(
            opened.files,
            {
                name: MadeTensor(one.shape, one.kind, lambda one=one: read(one))  # type: ignore[misc]
                for name, one in opened.tensors.items()
            },
        )

    monkeypatch.setattr(weights, "open_folder", watched)
    target = load(own, **way)
    gc.collect()
    assert matrices and not any(ref() is not None for ref in matrices)
    assert most[0] <= 3  # queries, keys and values
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(own) not in maps.read_text()
    assert target.source_fingerprint
