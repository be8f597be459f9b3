"""Compiled runner of EAGLE-3's network."""

from __future__ import annotations

from typing import Any

from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.kernels.cpu.compiled_autoregressive import CompiledAutoregressive, Parts, compiled_runner
from blockdraft.kernels.cpu.compiled_network import Beside


def compiled(network: Eagle3Network, beside: Beside, head: Any, owned: bool) -> CompiledAutoregressive | str:
    """As `compiled_runner`; the head is the network's own."""
    if type(network) is not Eagle3Network:  # a subclass may compute something else
        return f"it does not know networks of the kind {type(network).__name__}"
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
    return compiled_runner(network, parts, beside, owned)


RUNNERS = {Eagle3Network: compiled}
