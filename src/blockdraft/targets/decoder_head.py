"""MTP heads beside a target that are a layer of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.formats.folder import COPY_AGAIN, HEAD_TENSORS, blaming, check_shapes
from blockdraft.formats.stored import StoredTensor
from blockdraft.nn.decoder import layer_class
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.packed import PackedLinear, pack_weights
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets.base import Target
from blockdraft.targets.families import own_tensors
from blockdraft.targets.model_config import load_config
from blockdraft.targets.native_files import packing, quantize_matrix
from blockdraft.targets.weights import experts_apart

FUSION = "fc"  # name of the projection of embedding and hidden state


@dataclass(frozen=True)
class DecoderHead:
    """An MTP head.

    Attributes:
        config: Configuration of the decoder with the head's layer as its last.
        layer: The head's layer.
        fc: Projection of embedding and hidden state.
        norms: Weights of the norms of embedding and hidden state, and behind the layer, by the names of `MTPHead`.
    """

    config: DecoderConfig
    layer: DecoderLayer
    fc: PackedLinear
    norms: dict[str, Tensor]


def with_head_layer(config: DecoderConfig, routed: bool) -> DecoderConfig:
    """Return a decoder's configuration with the layer of an MTP head as its last, which has attention."""
    kind = next(kind for kind in config.layers if kind.attends)
    return replace(config, layers=(*config.layers, replace(kind, routed=routed)))


def runs_heads(target: Target) -> bool:
    """Return whether `read_decoder_head` reads the heads of a target."""
    return target.backend == "native" and target.is_compiled and target.kernels is not None


def read_decoder_head(
    target: Target, folder: Path, layer: Mapping[str, StoredTensor], around: Mapping[str, StoredTensor]
) -> DecoderHead:
    """Read an MTP head, packed for the target's kernels, with as many bits as the target.

    Args:
        target: A target for which `runs_heads` returns True.
        folder: Folder of the head, for messages.
        layer: Tensors of its layer, by their names in a layer of the target.
        around: Tensors around the layer, by their names in `MTPHead` without `.weight`.

    Raises:
        UsageError: A tensor is missing, has another shape, or is not one of the head's.
    """
    native: Any = target
    kernels, dtype, bits, own = target.kernels, target.dtype, native.bits, native.decoder.config
    assert kernels is not None
    number, size = len(own.layers), target.hidden_size
    config = with_head_layer(own, any(name.startswith("mlp.experts.") for name in layer))
    prefix = f"model.layers.{number}."
    named = own_tensors(load_config(folder), {prefix + name: tensor for name, tensor in layer.items()})
    tensors = experts_apart(named) | dict(around)
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if name.startswith(prefix)}
    shapes |= {name: (size, 2 * size) if name == FUSION else (size,) for name in around}
    with blaming(folder):
        check_shapes(shapes, tensors, HEAD_TENSORS, COPY_AGAIN)

    def read(name: str) -> Tensor | QuantizedWeight:
        weight = tensors[name].tensor()
        if weight.ndim != 2:
            return weight.to(dtype, copy=True)
        return weight if bits is None or name in config.gates else quantize_matrix(name, weight, bits, dtype)

    with torch.no_grad():
        module = layer_class(config)(config, number, read, packing(read, kernels))
        fc = PackedLinear(pack_weights([read(FUSION)], kernels))
        for product in (*module.modules(), fc):
            if isinstance(product, PackedLinear):
                product.dtype = dtype
        one = float(config.norm_plus_one)
        norms = {name: tensors[name].tensor().float() + one for name in around if name != FUSION}
    return DecoderHead(config, module, fc, norms)
