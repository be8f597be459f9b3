"""MTP heads in the checkpoints of the models that they were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.folder import blaming
from blockdraft.formats.stored import StoredTensor, check_floats, open_tensors
from blockdraft.text_files import read_json

INDEX = "model.safetensors.index.json"
QWEN, LAYER = "mtp.", "layers.0."
# DeepSeek's names of the parts around the layer; they have the same prefix as the parts of the layer.
NEXTN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
# Copies of the target's weights, and a table that is computed.
LEFT_OUT = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")


def find_head(folder: Path, num_layers: int) -> StoredHead:
    """Find the MTP head of a model with `num_layers` layers. Only files with tensors of the head are opened.

    Raises:
        UsageError: The folder has no head, several, or a quantized one, or a file cannot be read.
    """
    files = _files(folder)
    prefix = QWEN if any(name.startswith(QWEN) for name in files) else f"model.layers.{num_layers}."
    own = {name: file for name, file in files.items() if name.startswith(prefix)}
    if not own:
        raise UsageError(
            f"{folder} has no MTP head: no tensor's name begins with {QWEN} or model.layers.{num_layers}. Programs "
            "that save a model again leave it out, so give the folder as it was published; or use another drafter, "
            "such as a head that blockdraft train mtp trains."
        )
    second = f"{QWEN}layers.1." if prefix == QWEN else f"model.layers.{num_layers + 1}."
    if any(name.startswith(second) for name in files):
        raise UsageError(
            f"{folder} has several MTP layers ({second}*), and only one is supported; use another drafter."
        )
    opened: dict[str, StoredTensor] = {}
    for file in sorted(set(own.values())):
        with blaming(file):
            opened |= open_tensors([str(file)])
    head = {name: opened[name] for name in own if name in opened and not name.endswith(LEFT_OUT)}
    with blaming(folder):
        check_floats(head)
    if prefix == QWEN:
        return StoredHead(folder, head, QWEN + LAYER, {name: QWEN + name for name in NEXTN})
    return StoredHead(folder, head, prefix, {name: prefix + own for name, own in NEXTN.items()})


def holds_head(folder: Path) -> bool:
    """Return whether files of a folder hold an MTP head by the names of Qwen's. Broken ones do not."""
    with suppress(UsageError):
        return any(name.startswith(QWEN) for name in _files(folder))
    return False


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor by name."""
    if (folder / INDEX).is_file():
        with blaming(folder / INDEX):
            weight_map = read_json(folder / INDEX)["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with blaming(file):
            files |= dict.fromkeys(open_tensors([str(file)]), file)
    return files


@dataclass(frozen=True)
class StoredHead:
    """MTP head in a checkpoint, with tensors that are not read yet.

    Attributes:
        folder: Folder of the checkpoint, for messages.
        tensors: Tensors by their names in the checkpoint.
        layer: Prefix of the layer's tensors in the checkpoint.
        around: Names in the checkpoint of the parts around the layer, by their names in `MTPHead`.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    layer: str
    around: Mapping[str, str]

    @property
    def has_experts(self) -> bool:
        """Whether its MLP is a mixture of experts."""
        return any(".mlp.experts." in name for name in self.tensors)

    @property
    def parts(self) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
        """Tensors of the layer by their names in a layer, and those around it by their names in `MTPHead`."""
        around = {f"{own}.weight": name for name, own in self.around.items()}
        outside = {around[name]: tensor for name, tensor in self.tensors.items() if name in around}
        layer = {name.removeprefix(self.layer): tensor for name, tensor in self.tensors.items() if name not in around}
        return layer, outside

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Read the tensors of `MTPHead` in the checkpoint's dtype, by their names there.

        Args:
            shapes: Shape of each tensor.

        Raises:
            UsageError: A tensor is missing, has another shape, or is not one of the head's.
        """
        parts = {name: self._parts(name, shape) for name, shape in shapes.items()}
        expected = {part: shape for of_one in parts.values() for part, shape in of_one.items()}
        actual = {name: tensor.shape for name, tensor in self.tensors.items()}
        wrong = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
        if wrong:
            details = "; ".join(
                f"{name}: expected {expected.get(name)}, found {actual.get(name)}" for name in wrong[:5]
            )
            raise UsageError(
                f"{self.folder}: {len(wrong)} tensors of its MTP head do not fit its configuration: {details}. "
                "Copy the model's files again, or use another drafter."
            )
        return {
            name: torch.cat([self.tensors[part].tensor() for part in of_one]).view(shapes[name])
            for name, of_one in parts.items()
        }

    def _parts(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the checkpoint that a parameter is concatenated from, and their shapes."""
        stem, _, end = name.rpartition(".")
        whole = self.own(name)
        if not stem.endswith(".experts") or whole in self.tensors:
            return {whole: shape}
        kinds = ["gate", "up"] if end == "gate_up_proj" else ["down"]
        of_part = shape[1] // len(kinds), shape[2]
        return {f"{self.own(stem)}.{i}.{kind}_proj.weight": of_part for i in range(shape[0]) for kind in kinds}

    def own(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of `MTPHead`."""
        if name.startswith(LAYER):
            return self.layer + name.removeprefix(LAYER)
        module, _, leaf = name.rpartition(".")
        return f"{self.around[module]}.{leaf}"
