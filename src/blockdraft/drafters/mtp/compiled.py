"""Compiled runner of MTP heads of the kind that `blockdraft train mtp` makes."""

from __future__ import annotations

from typing import Any, cast

from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.kernels.cpu.compiled_autoregressive import CompiledAutoregressive, Parts, compiled_runner
from blockdraft.kernels.cpu.compiled_network import Beside
from blockdraft.nn.layers import RMSNorm


def compiled(network: MTPNetwork, beside: Beside, head: Any, owned: bool) -> CompiledAutoregressive | str:
    """Compiled runner of a network, or the reason for having none; see `compiled_runner`."""
    if type(network) is not MTPNetwork:  # a subclass may compute something else
        return f"it does not know networks of the kind {type(network).__name__}"
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
    return compiled_runner(network, parts, beside, owned, head)


RUNNERS = {MTPNetwork: compiled}
