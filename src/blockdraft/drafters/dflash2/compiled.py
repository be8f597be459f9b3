"""Compiled runner of DFlash2: that of DFlash, with convolutions in the layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from blockdraft.drafters.dflash.compiled import CompiledDraftPass, compiled
from blockdraft.drafters.dflash2.network import ConvolvedLayer, DFlash2Network, DynamicConv
from blockdraft.kernels.cpu.library import ConvolutionFields, LayerFields


class CompiledConvolvedPass(CompiledDraftPass):
    layer_class = ConvolvedLayer

    def _pack_layer(self, own: LayerFields, layer: Any) -> None:
        super()._pack_layer(own, layer)
        own.attention_conv = self._convolution(layer.attention_conv)
        own.mlp_conv = self._convolution(layer.mlp_conv)

    def _convolution(self, module: DynamicConv) -> ConvolutionFields:
        _, taps, groups = module.corrections
        # Rounding this small matrix to few bits would save little.
        projection = self._pack(module, "kernel_projection", rounds=False)
        base = self._pointer(module.base_kernel)
        return ConvolutionFields(projection=projection, base=base, taps=taps, groups=groups)


RUNNERS = {DFlash2Network: partial(compiled, kind=CompiledConvolvedPass)}
