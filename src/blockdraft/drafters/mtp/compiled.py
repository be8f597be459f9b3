"""Compiled runner of MTP heads with a layer of our own."""

from __future__ import annotations

from typing import cast

from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.kernels.cpu.compiled_autoregressive import CompiledAutoregressive, Parts
from blockdraft.kernels.cpu.compiled_network import CompiledHost
from blockdraft.nn.layers import RMSNorm


class CompiledMTP(CompiledAutoregressive):
    def __init__(self, network: MTPNetwork, host: CompiledHost, owned: bool = False) -> None:
        parts = Parts(
            layer=network.layers[0],
            token_norm=cast(RMSNorm, network.pre_fc_norm_embedding),
            hidden_state_norm=cast(RMSNorm, network.pre_fc_norm_hidden),
            norm=network.norm,
            rotary=network.rotary,
            normed_target_layers=None,
            normed_stream=False,
            normed_feedback=network.config.normed_feedback,
        )
        super().__init__(network, host, owned, parts)
