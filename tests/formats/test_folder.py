"""Folders of config.json and safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.formats.folder import check_tensors, open_folder, read_config, with_rope_theta


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.int8, "I8"), (torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_weights_that_are_no_numbers_as_they_stand(
    tiny_drafter_dir: Path, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    shutil.copytree(tiny_drafter_dir, tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(dtype)}, file)
    wrong = f"{tmp_path / 'drafter'}: fc.weight is of type {kind}; weights must be of one of F64, F32, BF16, F16"
    with pytest.raises(UsageError, match=wrong):
        read_drafter(tmp_path / "drafter", None, 3)


def test_which_files_hold_the_tensors(tmp_path: Path) -> None:
    """Those of an index, unless a newer model.safetensors is not among them; else any; else the pickled one."""

    def names(**options: Any) -> list[str]:
        return [file.name for file in open_folder(tmp_path, **options).files]

    def put(file: str, *tensors: str) -> None:
        save_file({name: torch.full((2, 3), float(number)) for number, name in enumerate(tensors)}, tmp_path / file)

    def index(**places: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    assert names() == [] and open_folder(tmp_path).kinds == {}
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.bin")
    assert names() == [] and names(pickle="weights.bin") == ["weights.bin"]
    put("one.safetensors", "a", "model.b")
    put("two.safetensors", "b", "e")
    assert names(pickle="weights.bin") == ["one.safetensors", "two.safetensors"]
    opened = open_folder(tmp_path)
    assert opened.kinds == {"F32": 24} and opened.bytes == sum(file.stat().st_size for file in opened.files)
    assert opened.tensors["model.b"].shape == (2, 3) and bool((opened.tensors["model.b"].tensor() == 1).all())
    with pytest.raises(UsageError, match="two.safetensors: b must be in one file, got 'a repeated"):
        open_folder(tmp_path, without="model.")
    index(b="two.safetensors", c="away.safetensors")
    assert [*open_folder(tmp_path, prefix="b").tensors] == ["b"]
    with pytest.raises(UsageError, match="away.safetensors cannot be read"):
        open_folder(tmp_path)
    put("model.safetensors", "d")
    assert names() == ["model.safetensors"]
    index(b="two.safetensors", d="model.safetensors")
    assert names() == ["model.safetensors", "two.safetensors"] and names(prefix="b") == ["two.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UsageError, match="index.json: weight_map must be an object, .*copy the file"):
        open_folder(tmp_path)
    index(b="two.safetensors", d=5)
    with pytest.raises(UsageError, match="index.json: weight_map of d must be a file name, got 5; copy the file again"):
        open_folder(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "drafter.gguf").write_text("GGUF")
    (tmp_path / "notes.txt").write_text("GGUF")
    with pytest.raises(
        UsageError, match=r"drafter.gguf is a file; give a folder .* blockdraft export .*drafter.gguf -"
    ):
        read_config(tmp_path / "drafter.gguf")
    with pytest.raises(UsageError, match=r"notes.txt is a file; give a folder that holds config.json\.$"):
        read_config(tmp_path / "notes.txt")


def test_maps_of_the_vocabulary_may_be_integers() -> None:
    actual = {"fc.weight": torch.zeros(2), "d2t": torch.zeros(3, dtype=torch.int64), "t2d": torch.zeros(5).bool()}
    shapes = {name: tuple(tensor.shape) for name, tensor in actual.items()}
    check_tensors(shapes, actual)
    with pytest.raises(UsageError, match="x is of type I64, and 1 other tensors are of such a type too; weights"):
        check_tensors(shapes, {"x": actual["d2t"], "y": actual["d2t"], **actual})


@pytest.mark.parametrize(
    ("rope", "old"),
    [
        ({"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 1e5, "rope_scaling": None}),
        (
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "partial_rotary_factor": 0.5},
        ),
        (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 1e4},
        ),
    ],
)
def test_rotary_embeddings_are_written_for_older_readers(rope: dict[str, object], old: dict[str, object]) -> None:
    raw = {"hidden_size": 8, "rope_parameters": rope}
    assert with_rope_theta(raw) == raw | old
    assert with_rope_theta(raw | {"rope_theta": 3.0})["rope_theta"] == 3.0  # what is there stays
    assert with_rope_theta({"hidden_size": 8}) == {"hidden_size": 8}
