"""Compiled runner of the MTP heads that are a layer of the native decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters.mtp.decoder_network import DecoderMTPNetwork
from blockdraft.kernels.cpu.compiled_autoregressive import CompiledAutoregressive
from blockdraft.kernels.cpu.compiled_decoder import shape_fields
from blockdraft.kernels.cpu.compiled_network import CompiledHost, NotCompiled
from blockdraft.kernels.cpu.library import Library
from blockdraft.nn.packed import PackedLinear


class CompiledDecoderHead(CompiledAutoregressive):
    """A `CompiledAutoregressive` whose weights are packed for the target's library already.

    Args:
        network, host, owned: As in `CompiledAutoregressive`.
    """

    @torch.no_grad()
    def __init__(self, network: DecoderMTPNetwork, host: CompiledHost, owned: bool = False) -> None:
        self._begin(network, host, 1, owned)
        parts: Any = network  # types of submodules are unknown
        decoder, layer = network.config.decoder, network.layer
        self._set_layer(self._layers[0], layer, decoder)
        own_head = None if self._reduced is None else self._pack(self._reduced.projection)
        norms = {"token_norm": parts.pre_fc_norm_embedding, "hidden_state_norm": parts.pre_fc_norm_hidden}
        self._model = self._model_fields(
            network.config,
            own_head,
            norm=self._exact_pointer(parts.norm.weight),
            embedding_scale=1.0,
            joined=self.library.linear(parts.fc),
            pairs=True,
            **{name: self._exact_pointer(norm.weight) for name, norm in norms.items()},
            **shape_fields(decoder, [layer.number]),
        )
        self._growing = None
        self._kept = self._kept_tokens(network)
        self._set_outputs(network, host, normed_feedback=network.config.normed_feedback)

    def _choose_library(self, network: DecoderMTPNetwork, host: CompiledHost) -> tuple[Library, int | None]:
        library = host.decoder.library
        packed = [module for module in network.modules() if isinstance(module, PackedLinear)]
        if any(layer.kernels is not library for layer in packed):
            raise NotCompiled("its weights are not packed for the target's library")
        return library, min((layer.bits for layer in packed if layer.bits is not None), default=None)

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The entry of slot s has position s - 1, but only differences between positions matter.
        rope = self.config.decoder.layers[-1].rope
        angles = torch.arange(count)[:, None] * torch.tensor(rope.inverse_frequencies)
        return [(angles.cos() * rope.scale, angles.sin() * rope.scale)]
