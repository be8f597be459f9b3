"""MTP heads in the checkpoints of the models that they were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.folder import COPY_AGAIN, HEAD_TENSORS, blaming, check_shapes, open_folder
from blockdraft.formats.stored import StoredTensor, check_floats

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
    layer, next_layer = (f"model.layers.{number}." for number in (num_layers, num_layers + 1))
    tensors = open_folder(folder, prefix=(QWEN, layer, next_layer)).tensors
    prefix = QWEN if any(name.startswith(QWEN) for name in tensors) else layer
    head = {name: one for name, one in tensors.items() if name.startswith(prefix) and not name.endswith(LEFT_OUT)}
    if not head:
        raise UsageError(
            f"{folder} has no MTP head: no tensor's name begins with {QWEN} or {layer} Programs "
            "that save a model again leave it out, so give the folder as it was published; or use another drafter, "
            "such as a head that blockdraft train mtp trains."
        )
    second = f"{QWEN}layers.1." if prefix == QWEN else next_layer
    if any(name.startswith(second) for name in tensors):
        raise UsageError(
            f"{folder} has several MTP layers ({second}*), and only one is supported; use another drafter."
        )
    with blaming(folder):
        check_floats(head)
    if prefix == QWEN:
        return StoredHead(head, QWEN + LAYER, {name: QWEN + name for name in NEXTN})
    return StoredHead(head, prefix, {name: prefix + own for name, own in NEXTN.items()})


def holds_head(folder: Path, num_layers: int) -> bool:
    """Return whether a folder holds an MTP head that `find_head` finds."""
    with suppress(UsageError):
        return bool(find_head(folder, num_layers).tensors)
    return False


@dataclass(frozen=True)
class StoredHead:
    """MTP head in a checkpoint, with tensors that are not read yet.

    Attributes:
        tensors: Tensors by their names in the checkpoint.
        layer: Prefix of the layer's tensors in the checkpoint.
        around: Names in the checkpoint of the parts around the layer, by their names in `MTPHead`.
    """

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
        check_shapes(expected, self.tensors, HEAD_TENSORS, COPY_AGAIN)
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
