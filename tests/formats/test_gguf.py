"""GGUF files: headers, parts, and blocks, which become weights of the same numbers."""

import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_writer import finish, random_blocks

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import FLOATS, READERS, GGUFTensor, bytes_held, gguf_outline, open_gguf, read_header
from blockdraft.nn.quantization import NestedFactors, QuantizedWeight, concatenate_weights

ROWS, INPUTS = 6, 512
SMAPS = Path("/proc/self/smaps")
FEW = [kind for kind in READERS if kind not in FLOATS]


def raw_matrix(kind: str, seed: int = 0) -> np.ndarray:
    """Return the bytes of a matrix `[ROWS, INPUTS]`."""
    if kind in FEW:
        return random_blocks(kind, (ROWS, INPUTS), seed)
    numbers = np.random.default_rng(seed).normal(size=(ROWS, INPUTS)).astype(np.float32)
    return gguf.quantize(numbers, GGMLQuantizationType[kind])


def write(path: Path, kinds: dict[str, str], parts: int = 0) -> dict[str, torch.Tensor]:
    """Write matrices of these types by name, and return the numbers that the gguf package reads."""
    writer, actual = gguf.GGUFWriter(path, "llama", split_max_tensors=parts), {}
    writer.add_float32("llama.eps", 1e-6)
    writer.add_array("tokenizer.words", ["a", "", "ü"])
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_array("flags", [True, False])
    writer.add_int64("far", -(2**40))
    for seed, (name, kind) in enumerate(kinds.items()):
        raw = raw_matrix(kind, seed)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
        actual[name] = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind]))
    finish(writer)
    return actual


def numbers_of(tensor: GGUFTensor) -> torch.Tensor:
    actual = tensor.read()
    return actual.dequantize() if isinstance(actual, QuantizedWeight) else actual.float()


@pytest.mark.parametrize("kind", sorted(READERS))
def test_numbers_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    """Bit for bit, in float32."""
    expected = write(tmp_path / "a.gguf", {"first": "F32", "x": kind})
    tensor = open_gguf(tmp_path / "a.gguf").tensors["x"]
    assert (tensor.kind, tensor.shape) == (kind, (ROWS, INPUTS))
    assert torch.equal(numbers_of(tensor), expected["x"])


# Bits, group, dtype of scales (int8: nested ones), whether there is an offset, lowest and highest code.
LAYOUTS = {
    "Q4_0": (4, 32, torch.float16, False, -8, 7),
    "Q4_1": (4, 32, torch.float16, True, 0, 15),
    "Q5_0": (8, 32, torch.float16, False, -16, 15),
    "Q5_1": (8, 32, torch.float16, True, 0, 31),
    "Q8_0": (8, 32, torch.float16, False, -128, 127),
    "Q2_K": (4, 16, torch.int8, True, 0, 3),
    "Q3_K": (4, 16, torch.int8, False, -4, 3),
    "Q4_K": (4, 32, torch.int8, True, 0, 15),
    "Q5_K": (8, 32, torch.int8, True, 0, 31),
    "Q6_K": (8, 16, torch.int8, False, -32, 31),
    "TQ1_0": (4, 256, torch.float16, False, -1, 1),
    "TQ2_0": (4, 256, torch.float16, False, -1, 2),
    "MXFP4": (4, 32, torch.float16, False, 0, 15),
    "NVFP4": (4, 16, torch.float16, False, 0, 15),
    "IQ4_NL": (8, 32, torch.float16, False, -127, 113),
    "IQ4_XS": (8, 32, torch.float32, False, -127, 113),
    "IQ3_S": (8, 32, torch.float32, False, -15, 15),
    "IQ3_XXS": (8, 32, torch.float32, False, -62, 62),
    "IQ2_S": (8, 16, torch.float32, False, -43, 43),
    "IQ2_XS": (8, 16, torch.float32, False, -43, 43),
    "IQ2_XXS": (8, 32, torch.float32, False, -43, 43),
    "IQ1_S": (8, 32, torch.float32, False, -9, 9),
    "IQ1_M": (8, 16, torch.float32, False, -9, 9),
}


@pytest.mark.skipif(not SMAPS.is_file(), reason="this system does not tell what is in memory")
@pytest.mark.parametrize("order", [None, torch.tensor([3, 1])])
def test_what_was_read_leaves_memory(order: torch.Tensor | None, tmp_path: Path) -> None:
    """Pages around the tensor leave memory too; the system reads them at the same time."""
    path = tmp_path / "a.gguf"
    write(path, {f"x{number}": "F32" for number in range(40)})
    file = open_gguf(path)
    replace(file.tensors["x20"], order=order).read()
    lines = SMAPS.read_text().splitlines()
    [place] = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    assert next(line.split()[1] for line in lines[place:] if line.startswith("Rss:")) == "0"


@pytest.mark.parametrize("kind", FEW)
def test_layout(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"x": kind})
    weight = open_gguf(tmp_path / "a.gguf").tensors["x"].read()
    assert isinstance(weight, QuantizedWeight)
    codes = int(weight.codes.min()), int(weight.codes.max())
    scale, offset = (
        each.numbers if isinstance(each, NestedFactors) else each for each in (weight.scale, weight.offset)
    )
    assert scale is not None and (offset is None or offset.dtype == scale.dtype)
    assert LAYOUTS[kind] == (weight.bits, weight.group, scale.dtype, offset is not None, *codes)
    assert bytes_held(kind) == weight.nbytes / (ROWS * INPUTS)


def test_all_types_of_the_package_are_read() -> None:
    known = set[str]()
    for kind in GGMLQuantizationType:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        with suppress(NotImplementedError):
            gguf.dequantize(block, kind)
            known.add(kind.name)
    assert known == set(READERS)


@pytest.mark.parametrize("kinds", [FEW, [kind for kind in FEW if LAYOUTS[kind][0] == 4]])
def test_kinds_joined_keep_their_numbers(kinds: list[str], tmp_path: Path) -> None:
    expected = write(tmp_path / "a.gguf", {kind: kind for kind in kinds})
    tensors = open_gguf(tmp_path / "a.gguf").tensors
    both = concatenate_weights(
        [weight for kind in kinds if isinstance(weight := tensors[kind].read(), QuantizedWeight)]
    )
    assert torch.equal(both.dequantize(), torch.cat([expected[kind] for kind in kinds]))


def test_metadata(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"x": "F32"})
    actual = open_gguf(tmp_path / "a.gguf").metadata
    assert actual["general.architecture"] == "llama" and actual["llama.eps"] == 1e-6 and actual["far"] == -(2**40)
    assert (actual["tokenizer.words"], actual["numbers"], actual["flags"]) == (
        ["a", "", "ü"],
        [1.5, -2.0],
        [True, False],
    )


def test_an_outline_is_read_again_once_the_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, {"x": "Q4_0"})
    whole, outline = open_gguf(path), gguf_outline(path)
    assert outline.metadata.keys() == whole.metadata.keys() - {"tokenizer.words"}
    assert gguf_outline(path) is outline
    write(path, {"x": "Q4_0", "y": "F32"})
    assert [*gguf_outline(path).tensors] == ["x", "y"]
    path.unlink()
    with pytest.raises(UsageError, match="There is no file"):
        gguf_outline(path)


def test_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    expected = {name: np.full((1, 3), value, np.float32) for name, value in (("a", 1.0), ("b", 2.0))}
    for name, values in expected.items():
        writer.add_tensor(name, values)
    finish(writer)
    actual = open_gguf(tmp_path / "a.gguf").tensors
    assert all(numbers_of(actual[name]).tolist() == values.tolist() for name, values in expected.items())


def test_parts(tmp_path: Path) -> None:
    kinds = dict(zip("abcde", (*FEW[-4:], "F16"), strict=True))
    expected = write(tmp_path / "m.gguf", kinds, parts=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        file = open_gguf(tmp_path / name)
        assert file.path.name == names[0] and file.metadata["llama.eps"] == 1e-6
        assert all(torch.equal(numbers_of(file.tensors[key]), expected[key]) for key in kinds)
    (tmp_path / names[1]).rename(tmp_path / "else.gguf")
    for path in (tmp_path / names[0], tmp_path / names[2]):
        with pytest.raises(UsageError, match=f"one of 3 parts, and {names[1]} are not beside it"):
            open_gguf(path)
    with pytest.raises(UsageError, match="else.gguf is one of 3 parts; give them names that end in -00001-of-00003"):
        open_gguf(tmp_path / "else.gguf")
    (tmp_path / names[2]).rename(tmp_path / names[1])
    write(tmp_path / names[2], {"z": "F32"})
    with pytest.raises(UsageError, match="do not belong together: they hold 4 tensors"):
        open_gguf(tmp_path / names[0])


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, {"x": "Q4_K", "y": "Q6_K"})
    whole = path.read_bytes()
    for length in [*range(8, 600, 7), len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"a\.gguf is corrupt or cut short"):
            read_header(path)
    for content, message in (
        (b"", "is no GGUF file: it begins with b''"),
        (b"PK\3\4" + whole[4:], r"it begins with b'PK\\x03\\x04' instead of b'GGUF'"),
        (b"GGUF\1\0\0\0" + whole[8:], "is GGUF of version 1; use a file of version 3"),
        (whole.replace(b"llama.eps", b"llama.e\xff\xff"), "corrupt or cut short"),
        (b"GGUF" + b"\0\0\0\3" + whole[8:], "is big-endian; make it little-endian with"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            read_header(path)
    with pytest.raises(UsageError, match="There is no file"):
        open_gguf(tmp_path / "absent.gguf")


ARRAY, UINT32 = 9, 4
LARGEST = 2**64 - 1


def header(*pairs: tuple[str, bytes], tensors: bytes = b"", count: int = 1) -> bytes:
    """Return the header of a file with these keys, typed values, and `count` tensors."""
    begin = b"GGUF" + struct.pack("<IQQ", 3, count if tensors else 0, len(pairs))
    return begin + b"".join(text(key) + value for key, value in pairs) + tensors + bytes(64)


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def tensor_at(name: str, offset: int) -> bytes:
    """Return the header entry of a vector of 8 numbers in float32."""
    return text(name) + struct.pack("<IQIQ", 1, 8, 0, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(("general.alignment", struct.pack("<II", UINT32, 0))), "tensors are aligned by 0"),
        (header(("general.alignment", struct.pack("<IQ", 8, 0))), "tensors are aligned by "),
        (header(("a", struct.pack("<IIQ", ARRAY, UINT32, LARGEST))), "a.gguf is corrupt or cut short"),
        (header(("a", struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000)), "recursion"),
        (header(tensors=text("x") + struct.pack("<I", 2**32 - 1)), "x has 4294967295 dimensions"),
        (header(tensors=text("x") + struct.pack("<IQQQ", 2, LARGEST, LARGEST, 0)), "x of the shape|x would end at"),
        (header(("a", struct.pack("<II", UINT32, 1)), ("a", struct.pack("<II", UINT32, 1))), "it has the key a twice"),
        (header(tensors=tensor_at("x", 0) + tensor_at("y", 16), count=2), "x and y overlap"),
        (header(tensors=tensor_at("x", 0) + tensor_at("x", 0), count=2), "it has the tensor x twice"),
        (header(("split.count", struct.pack("<I", 8) + text("x"))), "is one of x parts"),
    ],
)
def test_headers_that_lie(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_gguf(tmp_path / "a.gguf")


def test_the_package_writes_big_endian_as_we_think(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    finish(writer)
    with pytest.raises(UsageError, match="is big-endian"):
        open_gguf(tmp_path / "a.gguf")


def test_types_that_are_not_read_are_still_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("x", np.ones((2, 40), np.uint8), raw_dtype=GGMLQuantizationType.Q8_1)
    writer.add_tensor("y", np.ones((2, 3), np.float32))
    finish(writer)
    tensors = open_gguf(tmp_path / "a.gguf").tensors
    assert (tensors["x"].kind, tensors["x"].shape) == ("Q8_1", (2, 32))
    assert numbers_of(tensors["y"]).tolist() == [[1.0] * 3] * 2
