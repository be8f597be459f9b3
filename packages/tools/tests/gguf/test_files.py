"""Writing of GGUF files: content, and nothing half-written after a failure."""

from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, LlamaFileType

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.stored import stored
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft_tools.gguf import MatrixType
from blockdraft_tools.gguf.files import new_files, write_gguf

NUMBERS = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
VALUES = {
    "general.name": "tiny",
    "toy.count": 7,
    "toy.share": 1e-6,
    "toy.is_so": True,
    "toy.names": ["a", "ß"],
    "toy.layers": [1, 2],
    "toy.near": [True, False],
}


@pytest.mark.parametrize("weights", get_args(MatrixType))
def test_what_is_written_is_read_back(weights: MatrixType, tmp_path: Path) -> None:
    matrices = {
        "blk.0.a.weight": NUMBERS.to(torch.bfloat16),
        "token_embd.weight": NUMBERS,
        "output.weight": 2 * NUMBERS,
    }
    others = {"norm.weight": NUMBERS[0], "one_row.weight": NUMBERS[:1], "cube": NUMBERS.view(2, 3, 64)}
    ids = torch.tensor([3, 1 << 40])
    tensors = {name: stored(tensor) for name, tensor in {**matrices, **others, "ids": ids}.items()}
    write_gguf(tmp_path / "a.gguf", "toy", VALUES, tensors, weights)
    file = open_gguf(tmp_path / "a.gguf")
    kind = weights.upper()
    number = LlamaFileType.ALL_F32 if weights == "f32" else LlamaFileType[f"MOSTLY_{kind}"]
    assert file.metadata.items() >= {**VALUES, "general.architecture": "toy", "general.file_type": number}.items()
    for name, matrix in matrices.items():
        its = "Q8_0" if weights == "q4_0" and not name.startswith("blk") else kind
        assert file.tensors[name].kind == its
        rounded = gguf.quantize(matrix.float().numpy(), GGMLQuantizationType[its])
        actual = file.tensors[name].read()
        actual = actual.dequantize() if isinstance(actual, QuantizedWeight) else actual.float()
        np.testing.assert_array_equal(actual.numpy(), gguf.dequantize(rounded, GGMLQuantizationType[its]))
    for name, tensor in others.items():
        assert file.tensors[name].kind == "F32" and torch.equal(file.tensors[name].read(), tensor)  # type: ignore[arg-type]
    assert torch.equal(file.tensors["ids"].read(), ids)  # type: ignore[arg-type]
    reader = gguf.GGUFReader(tmp_path / "a.gguf")  # as others read it
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    np.testing.assert_array_equal(reader.tensors[4].data.reshape(-1), NUMBERS[0].numpy())


def test_what_cannot_be_rounded(tmp_path: Path) -> None:
    short, large = stored(torch.ones(4, 40)), stored(torch.full((4, 32), 1e5))
    with pytest.raises(UsageError, match="x.weight has 40 columns, and Q4_0 rounds 32 numbers at a time; use bf16"):
        write_gguf(tmp_path / "a.gguf", "toy", {}, {"x.weight": short}, "q4_0")
    for wrong in (float("nan"), -float("inf")):
        bad = torch.ones(4, 32)
        bad[2, 3] = wrong
        for weights in get_args(MatrixType):
            with pytest.raises(UsageError, match=f"x.weight holds {abs(wrong)}, so its model is broken"):
                write_gguf(tmp_path / "a.gguf", "toy", {}, {"x.weight": stored(bad)}, weights)
    with pytest.raises(UsageError, match="x.weight holds 100000, which f16 cannot represent; use bf16 or f32"):
        write_gguf(tmp_path / "a.gguf", "toy", {}, {"x.weight": large}, "f16")


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with pytest.raises(RuntimeError), new_files(out) as folder:
        (folder / "a").write_text("half")
        raise RuntimeError("a fault")
    assert not out.exists()
    (out / ".partial").mkdir(parents=True)
    (out / ".partial" / "of a killed process").touch()
    (out / "b").write_text("old")
    with new_files(out) as folder:
        (folder / "a").write_text("whole")
        (folder / "b").write_text("new")
        assert not (out / "a").exists() and (out / "b").read_text() == "old"
    assert {file.name: file.read_text() for file in out.iterdir()} == {"a": "whole", "b": "new"}
    with pytest.raises(UsageError, match="cannot be written .*; nothing of it is left"), new_files(out) as folder:
        (folder / "c").touch()
        raise OSError("no space left")
    assert {file.name for file in out.iterdir()} == {"a", "b"}
    with pytest.raises(UsageError, match="a is a file; choose a folder for --out"), new_files(out / "a"):
        pass
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "out", "a", "b"}
