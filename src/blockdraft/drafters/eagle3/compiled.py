"""Compiled runner of EAGLE-3's network."""

from __future__ import annotations

from dataclasses import replace

from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.kernels.cpu.compiled_autoregressive import CompiledAutoregressive, Parts
from blockdraft.kernels.cpu.compiled_network import CompiledHost


class CompiledEagle3(CompiledAutoregressive):
    def __init__(self, network: Eagle3Network, host: CompiledHost, owned: bool = False) -> None:
        layer = network.midlayer
        parts = Parts(
            layer=layer,
            token_norm=layer.input_layernorm,
            hidden_state_norm=layer.hidden_norm,
            norm=network.norm,
            rotary=network.rotary,
            normed_target_layers=network.normed_target_layers,
            normed_stream=network.config.norm_before_residual,
            normed_feedback=network.config.norm_output,
        )
        super().__init__(network, replace(host, own_head=None), owned, parts)  # the network has a head itself
