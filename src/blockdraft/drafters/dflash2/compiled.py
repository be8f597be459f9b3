"""Compiled runner of DFlash2: that of DFlash, with convolutions in the layers."""

from __future__ import annotations

from typing import Any

from blockdraft.drafters.dflash.compiled import CompiledDraftPass
from blockdraft.drafters.dflash2.network import DynamicConv
from blockdraft.kernels.cpu.library import ConvolutionFields, LayerFields


class CompiledConvolvedPass(CompiledDraftPass):
    def _pack_layer(self, own: LayerFields, layer: Any) -> None:
        super()._pack_layer(own, layer)
        own.attention_conv = self._convolution(layer.attention_conv)
        own.mlp_conv = self._convolution(layer.mlp_conv)

    def _convolution(self, module: DynamicConv) -> ConvolutionFields:
        _, taps, groups = module.corrections
        projection = self._pack(module.kernel_projection, quantize=False)  # small, so 4 bits would save little
        base = self._pointer(module.base_kernel)
        return ConvolutionFields(projection=projection, base=base, taps=taps, groups=groups)
