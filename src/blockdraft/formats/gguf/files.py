"""Reader of GGUF files, the format of llama.cpp. Quantized tensors become a `QuantizedWeight` with the same values.

The package gguf does not read the header, because its reader creates several numpy arrays for each token of the
vocabulary, which takes half a gigabyte and many seconds for a common model.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf.blocks import INDICES, READERS
from blockdraft.formats.stored import StoredTensor, TensorFiles, dense
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.text_files import refuse_pointer

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
SIZE = struct.Struct("<Q")  # length of a string, before it
ALIGNMENT = 32  # default alignment of tensors, in bytes
MAX_DIMENSIONS = 4
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """Tensor in a memory-mapped file. Its type must be one of `READERS` or `INDICES` to be read.

    Attributes:
        kind: Name of the tensor's type, such as "Q4_0" or "F16".
        shape: Shape in torch's order, outputs before inputs.
        place: Offset of its first byte in the file.
        order: Which row of the file each row is, `[n]` int64; None is all rows in their order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: mmap.mmap
    place: int
    order: Tensor | None = None

    def part(self, index: int) -> GGUFTensor:
        """Return one matrix of several, `[matrices, out, in]`."""
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        shape = self.shape[1:]
        return replace(self, shape=shape, place=self.place + index * (math.prod(shape) // values * size))

    @contextmanager
    def mapped(self) -> Iterator[np.ndarray]:
        """Yield the bytes of each row in the file, `[..., out, bytes]` uint8, and release their memory afterwards."""
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        shape = (*self.shape[:-1], self.shape[-1] // values * size)
        yield np.frombuffer(self.file, np.uint8, math.prod(shape), self.place).reshape(shape)
        _release(self.file)

    def read(self) -> Tensor | QuantizedWeight:
        size, order = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]][1], self.order
        by_value = order is not None and len(self.shape) == 1
        with self.mapped() as mapped:
            raw = mapped.copy() if order is None or by_value else mapped[order.numpy()]
        raw = raw.reshape(*raw.shape[:-1], -1, size)
        weight = (READERS | INDICES)[self.kind](torch.from_numpy(raw))
        return dense(weight)[order] if by_value else weight

    def in_file(self, positions: Tensor) -> Tensor:
        """Return which value of the file each value is, by their indices, `[n]` int64."""
        inputs = math.prod(self.shape[1:])
        return positions if self.order is None else self.order[positions // inputs] * inputs + positions % inputs


def read_values(tensors: Sequence[GGUFTensor], positions: Sequence[Tensor]) -> Sequence[Tensor]:
    """Read some values of tensors of one type in one file, at `positions`, `[n]` int64 for each tensor."""
    kind, file = tensors[0].kind, tensors[0].file
    positions = [tensor.in_file(own) for tensor, own in zip(tensors, positions, strict=True)]
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    begins = [tensor.place + own // values * size for tensor, own in zip(tensors, positions, strict=True)]
    raw = np.frombuffer(file, np.uint8)[(torch.cat(begins)[:, None] + torch.arange(size)).numpy()]
    _release(file)
    blocks, within = dense(READERS[kind](torch.from_numpy(raw).unsqueeze(1))), torch.cat(positions) % values
    parts: Sequence[Tensor] = blocks[torch.arange(len(blocks)), within].split(list(map(len, positions)))
    return parts


def _release(file: mmap.mmap) -> None:
    """Release the memory of the pages that were read."""
    if hasattr(file, "madvise"):
        file.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class GGUFFile(TensorFiles):
    """A GGUF file, or all parts of a split one.

    Attributes:
        path: The file, or the first part.
        metadata: Values by their keys.
    """

    tensors: Mapping[str, GGUFTensor]
    metadata: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.files[0]


MAX_OUTLINES = 8
_outlines: dict[str, tuple[tuple[int, int] | None, GGUFFile]] = {}  # by path, with the version of the file


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file."""
    return str(path).lower().endswith(SUFFIX)


def open_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a file, or of all parts if the file is one of several.

    Raises:
        UsageError: A part is missing, not a GGUF file, of another version or byte order, or truncated.
    """
    version, file = _version(path), _open(path)
    lists = {key for key, value in file.metadata.items() if key.startswith("tokenizer.") and isinstance(value, list)}
    kept = {key: value for key, value in file.metadata.items() if key not in lists}
    _outlines[str(path)] = version, replace(file, metadata=kept)
    if len(_outlines) > MAX_OUTLINES:
        _outlines.pop(next(iter(_outlines)), None)
    return file


def _open(path: str | Path) -> GGUFFile:
    metadata, tensors = read_header(Path(path))
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return GGUFFile([Path(path)], tensors, metadata)
    named = SHARD.fullmatch(str(path))
    if named is None or int(named[3]) != count:
        raise UsageError(f"{path} is one of {count} parts; give them names that end in -00001-of-{count:05}.gguf.")
    parts = [Path(f"{named[1]}-{number:05}-of-{count:05}{named[4]}") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UsageError(f"{path} is one of {count} parts, and {', '.join(missing)} are not beside it; download them.")
    headers = [read_header(part) for part in parts]
    tensors = {name: tensor for _, own in headers for name, tensor in own.items()}
    metadata = headers[0][0]
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise UsageError(
            f"The parts of {path} do not belong together: they hold {len(tensors)} tensors; download all again."
        )
    return GGUFFile(parts, tensors, metadata)


def gguf_outline(path: str | Path) -> GGUFFile:
    """Read a file as `open_gguf` does, without the lists of its tokenizer, such as the vocabulary.

    It is kept from when the file was last opened, since reading a vocabulary takes a tenth of a second.
    """
    kept = _outlines.get(str(path))
    if kept is None or kept[0] != _version(path):
        open_gguf(path)
        kept = _outlines[str(path)]
    return kept[1]


def _version(path: str | Path) -> tuple[int, int] | None:
    """Return size and date of a file."""
    about = Path(path).stat() if Path(path).is_file() else None
    return None if about is None else (about.st_size, about.st_mtime_ns)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read metadata and tensors of one file. Errors as in `open_gguf`."""
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    with path.open("rb") as opened:
        begin = opened.read(len(MAGIC) + 4)
        if not begin.startswith(MAGIC):
            refuse_pointer(path)
            raise UsageError(f"{path} is no GGUF file: it begins with {begin[:4]!r} instead of {MAGIC!r}.")
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    version = int.from_bytes(begin[len(MAGIC) :], "little")
    if version and version % 2**16 == 0:
        raise UsageError(f"{path} is big-endian; make it little-endian with gguf-convert-endian of the package gguf.")
    try:
        if version not in VERSIONS:
            raise UsageError(f"{path} is GGUF of version {version}; use a file of version {VERSIONS[-1]}.")
        return _Cursor(data, len(begin)).header()
    except (struct.error, ValueError, EOFError, OverflowError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is corrupt or cut short ({error}); copy or download it again.") from error


class _Cursor:
    """Reads the values of a header in sequence."""

    def __init__(self, data: mmap.mmap, place: int) -> None:
        self.data, self.place = data, place

    def header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        count, keys = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in metadata:
                raise ValueError(f"it has the key {key} twice")
            metadata[key] = self.value(GGUFValueType(self.number("I")))
        entries = [self.tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"tensors are aligned by {alignment}")
        start = -(-self.place // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        free, before = start, ""  # first byte after the tensors so far, and the name of the last one
        for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[-1]):
            if name in tensors:
                raise ValueError(f"it has the tensor {name} twice")
            end = start + offset + _bytes(name, kind, shape)
            if end > len(self.data):
                raise EOFError(f"{name} would end at byte {end} of {len(self.data)}")
            if start + offset < free:
                raise ValueError(f"{before} and {name} overlap")
            free, before = end, name
            tensors[name] = GGUFTensor(name, kind, shape, self.data, start + offset)
        return metadata, tensors

    def number(self, kind: str) -> Any:
        [value] = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        # The shortest decimal of a float32 is meant, such as 1e-6, and not its exact value.
        return float(str(np.float32(value))) if kind == "f" else value

    def text(self, errors: str = "strict") -> str:
        [value] = self.texts(1, errors)
        return value

    def texts(self, count: int, errors: str = "strict") -> list[str]:
        """Read consecutive strings; `errors` as in `bytes.decode`.

        A vocabulary has hundreds of thousands, so the loop makes few calls.
        """
        data, place, size_of = self.data, self.place, SIZE.unpack_from
        values = []
        for _ in range(count):
            begin = place + SIZE.size
            place = begin + size_of(data, place)[0]
            if place > len(data):
                raise EOFError(f"a text would end at byte {place} of {len(data)}")
            values.append(data[begin:place].decode(errors=errors))
        self.place = place
        return values

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text("replace")  # a name or a licence, which must not refuse the file
        if kind != GGUFValueType.ARRAY:
            return self.number(NUMBERS[kind])
        inner, count = GGUFValueType(self.number("I")), self.number("Q")
        if inner == GGUFValueType.STRING:
            return self.texts(count)
        if inner not in NUMBERS:
            return [self.value(inner) for _ in range(count)]
        numbers = np.frombuffer(self.data, f"<{NUMBERS[inner]}", count, self.place)
        self.place += numbers.nbytes
        return numbers.tolist()

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Read name, shape, type, and offset after the header."""
        name = self.text()
        dimensions = self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        number = self.number("I")
        known = number in GGMLQuantizationType.__members__.values()
        kind = GGMLQuantizationType(number).name if known else str(number)
        return name, tuple(reversed(shape)), kind, self.number("Q")


def _bytes(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes, or 0 if its type is not supported."""
    if kind not in READERS | INDICES:
        return 0
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if not shape or shape[-1] % values:
        raise ValueError(f"{name} of the shape {list(shape)} cannot be of {kind}")
    count = 1
    for extent in shape:
        count *= extent
    return count // values * size
