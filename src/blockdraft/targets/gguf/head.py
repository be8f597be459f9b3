"""Reader of the MTP head in a GGUF file: a layer behind the decoder's own, and the parts that join its inputs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import GGUFFile, gguf_outline
from blockdraft.formats.stored import dense
from blockdraft.kernels.cpu.library import Library
from blockdraft.nn.decoder import layer_class
from blockdraft.nn.decoder_layer import plain
from blockdraft.nn.packed import PackedLinear, pack_weights
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets.base import NotCovered, Target
from blockdraft.targets.checkpoint import loading
from blockdraft.targets.decoder_head import DecoderHead, with_head_layer
from blockdraft.targets.families import decoder_config
from blockdraft.targets.gguf.checkpoint import file_packing, understanding
from blockdraft.targets.gguf.config import gguf_config
from blockdraft.targets.gguf.tensors import fitted, layer_weights
from blockdraft.targets.native_files import packing

NORMS = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
FUSION = "eh_proj"


def has_head(file: GGUFFile) -> bool:
    """Return whether a file holds an MTP head of one layer."""
    heads = file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")
    return heads == 1 and any(name.endswith(f".nextn.{FUSION}.weight") for name in file.tensors)


def read_gguf_head(target: Target) -> DecoderHead:
    """Read the MTP head in a target's file, in the target's dtype and on its device, packed for its kernels.

    Raises:
        UsageError: The file has no head or several, or one that does not fit the model.
    """
    path, kernels = target.path, cast("Library | None", target.kernels)
    assert path is not None
    file = gguf_outline(path)
    heads = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers")
    if not heads:
        raise UsageError(
            f"{path} has no MTP head: its nextn_predict_layers is missing or 0. llama.cpp's converter leaves the head "
            "out with --no-nextn, and that of DeepSeek-V3 always; convert the model without that option, or use "
            "another drafter."
        )
    with understanding(path):
        config = fitted(decoder_config(gguf_config(file)), file)
        number = len(config.layers)
        if heads != 1:
            raise NotCovered("it has several MTP layers, of which only one is supported")
        config = with_head_layer(config, f"blk.{number}.ffn_gate_inp.weight" in file.tensors)
        weights = layer_weights(file, config, number)
        size, parts = config.hidden_size, {}
        for name in (*NORMS.values(), FUSION):
            stored = f"blk.{number}.nextn.{name}.weight"
            if name == NORMS["norm"] and stored not in file.tensors:
                stored = "output_norm.weight"  # as llama.cpp does
            shape = (size, 2 * size) if name == FUSION else (size,)
            if stored not in file.tensors or file.tensors[stored].shape != shape:
                raise NotCovered(f"its MTP head lacks {stored} of the shape {list(shape)}")
            parts[name] = file.tensors[stored]

    # Kernels for a decoder of unquantized weights may be built without those for quantized ones.
    takes_integers = kernels is None or kernels.has_integers

    def to_target(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if target.device.type != "cpu":
            return dense(weight).to(target.device, target.dtype)
        if isinstance(weight, QuantizedWeight) and not takes_integers:
            weight = dense(weight)
        if isinstance(weight, QuantizedWeight) or (kernels is not None and weight.ndim == 2):
            return weight
        return weight.to(target.dtype)

    def read(name: str) -> Tensor | QuantizedWeight:
        return to_target(weights.read(name))

    with loading(path, target.device), torch.no_grad():
        make = None
        if kernels is not None:
            make = file_packing(weights, read, kernels) if takes_integers else packing(read, kernels)
        layer = layer_class(config)(config, number, read, make)
        fusion = to_target(parts[FUSION].read())
        fc = PackedLinear(fusion if kernels is None else pack_weights([fusion], kernels))
        for product in (*layer.modules(), fc):
            if isinstance(product, PackedLinear):
                product.dtype = target.dtype
        norms = {ours: plain(to_target(parts[theirs].read())) for ours, theirs in NORMS.items()}
    return DecoderHead(config, layer, fc, norms)
