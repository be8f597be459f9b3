"""Model folders, written one shard at a time, completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import clear_remains, held, replaced
from blockdraft.formats.folder import with_rope_theta
from blockdraft.nn.quantization import QuantizedWeight

SHARD = 2_000_000_000  # approximate bytes per file, which are in memory together


class ModelWriter:
    """Writes a checkpoint's tensors to `folder` in files of about `SHARD` bytes.

    Quantized weights are written in the layout of compressed-tensors.

    Attributes:
        bytes: Bytes of the tensors written so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = 0
        self._shards: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}

    def take(self, weights: Iterable[tuple[str, Tensor | QuantizedWeight]]) -> None:
        """Add tensors, and write a file whenever there are enough."""
        for name, weight in weights:
            if isinstance(weight, QuantizedWeight):
                self._pending |= parts_of(name.removesuffix(".weight"), weight)
            else:
                self._pending[name] = weight
            if sum(tensor.nbytes for tensor in self._pending.values()) >= SHARD:
                self._write()

    def clear(self) -> None:
        """Delete all tensors taken so far."""
        for number in range(1, len(self._shards) + 1):
            self._shard(number).unlink()
        self.bytes, self._shards, self._pending = 0, [], {}

    def finish(self, raw: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Write the remaining tensors, config.json with the content `raw`, and copies of these files."""
        self._write()
        count = len(self._shards)
        places: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._shard(number).rename(self.folder / name)
            places |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        for file in files:
            shutil.copyfile(file, self.folder / file.name)
        config = self.folder / "config.json"
        config.write_text(json.dumps(with_rope_theta(raw), indent=2) + "\n", encoding="utf-8")
        for file in self.folder.glob("*.safetensors"):
            file.chmod(config.stat().st_mode)  # since safetensors lets only the owner read

    def _write(self) -> None:
        if self._pending:
            self._shards.append(list(self._pending))
            self.bytes += sum(tensor.nbytes for tensor in self._pending.values())
            whole = {name: tensor.contiguous() for name, tensor in self._pending.items()}
            save_file(whole, self._shard(len(self._shards)), metadata={"format": "pt"})
            self._pending = {}

    def _shard(self, number: int) -> Path:
        return self.folder / f"shard-{number}.safetensors"


def check_free(out: Path) -> None:
    """Raise a UsageError unless a path is free or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already; choose another folder for --out.")


@contextmanager
def new_folder(out: Path, need: int) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end, or is deleted after an error.

    Args:
        need: Approximate number of bytes that will be written.

    Raises:
        UsageError: `out` is not empty, another process writes it, or the disk has too little space.
    """
    out = out.absolute()
    check_free(out)
    with held(out, "quantizing"):
        try:
            clear_remains(out)
            with replaced(out) as new:
                free = shutil.disk_usage(new).free
                if need > free:
                    raise UsageError(
                        f"{out} needs {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free; make room or "
                        "choose another --out."
                    )
                yield new
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{out} cannot be written ({error}); nothing of it is left.") from error


def parts_of(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a weight in `pack-quantized`; scales must not be nested, and zero points be integers."""
    assert isinstance(weight.scale, Tensor), weight.scale
    middle, codes = 1 << weight.bits - 1, weight.codes.view(torch.uint8)
    values = codes ^ 128 if weight.bits == 8 else (weight.codes + (8 if weight.offset is None else 0)).view(torch.uint8)
    parts = {
        f"{module}.weight_packed": packed(values, weight.bits),
        f"{module}.weight_scale": weight.scale,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if weight.offset is not None:
        shift = middle if weight.bits == 8 else 0
        zeros = (shift - weight.offset.float() / weight.scale.float()).round()
        zeros = torch.where(weight.scale == 0, float(middle), zeros).to(torch.uint8).T
        rest = -zeros.size(1) % (32 // weight.bits)
        parts[f"{module}.weight_zero_point"] = packed(
            torch.nn.functional.pad(zeros, (0, rest)), weight.bits
        ).T.contiguous()
    return parts


def packed(values: Tensor, bits: int) -> Tensor:
    """Pack unsigned values `[n, values]` uint8 into int32 words `[n, words]`, lowest bits first."""
    octets = values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4
    # Copied to standard strides; `contiguous` keeps any stride of a dimension of size 1.
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)
