"""DFlash's draft pass in JAX."""

from __future__ import annotations

from typing import cast

import numpy as np
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.layers import ReducedHead
from blockdraft.timing import PASS, mark
from blockdraft_jax.cache import JaxCache, JaxTensor
from blockdraft_jax.draft_runner import Context, JaxDraftRunner, JaxHost, draft_window, padded
from blockdraft_jax.model import Array, Memory, Params, as_numpy, bucket, embed, jax, jnp, linear


class JaxDraftPass(JaxDraftRunner):
    """A `DraftRunner` for DFlash networks.

    Args:
        network: Network in the target's dtype; its parameters are copied to the devices.
    """

    config: DraftConfig

    def __init__(self, network: DFlashNetwork, host: JaxHost) -> None:
        own = ("fc.", "hidden_norm.", "layers.", "norm.")  # the heads of networks that extend DFlash stay in torch
        tensors = {f"model.{name}": tensor for name, tensor in network.state_dict().items() if name.startswith(own)}
        super().__init__(network.config, host, tensors, [layer.window for layer in network.config.layers])
        if host.own_head is not None:
            head = cast(ReducedHead, host.own_head)
            self.params["reduced"] = self._layout.put(as_numpy(head.weight))
            self.params["kept"] = self._layout.put(as_numpy(head.kept).astype(np.int32))
        self.jax_forward, self.jax_observe = jax.jit(self._forward, static_argnums=0), jax.jit(self._observe)

    def observe(self, state: JaxCache, hidden_states: Tensor) -> None:
        hidden, view = self.hidden_states(hidden_states), state.view_of_batch()
        state.pending = self.jax_observe(self.params, hidden, view.lengths)

    def draft_tokens(
        self, state: JaxCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, count = tokens.shape
        block = padded(tokens, (bucket(batch), bucket(count)))
        arguments = self._layout.put((block, np.int32(count), draft_window(window)))
        hidden, logits = self.jax_forward(first, self.context(state), *arguments)
        mark(PASS)
        shape = batch, count - first
        return JaxTensor(hidden, (*shape, hidden.shape[-1])), JaxTensor(logits, (*shape, logits.shape[-1]))

    def _observe(self, params: Params, hidden: Array, lengths: Array) -> Memory:
        """Return keys and values of committed tokens, whose hidden states pass through `fc` and `hidden_norm` only."""
        fused = linear(params, "model.fc", hidden.astype(self._dtype))
        fused = self.decoder.norm(params, "model.hidden_norm.weight", fused)
        rotation = self.rotation(lengths[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32))
        layers = range(len(self.decoder.config.layers))
        heads = [self.decoder.queries_keys_values(params, layer, fused, rotation) for layer in layers]
        _, keys, values = zip(*heads, strict=True)
        return jnp.stack(keys), jnp.stack(values)

    def _forward(self, first: int, context: Context, block: Array, size: Array, window: Array) -> tuple[Array, Array]:
        """Run one pass over blocks of tokens `[B, N]`, of which the first `size` count and the others are padding.

        Returns:
            Hidden states after the final norm, and logits, of the positions from `first` on.
        """
        params, view, (batch, count) = context.params, context.view, block.shape
        scale, x = self.config.input_embedding_scale, embed(context.target_params, block).astype(self._dtype)
        x = x if scale == 1 else x * scale
        at = jnp.arange(count, dtype=jnp.int32)
        positions = view.lengths[:, None] + at
        masks = {}
        for kind in dict.fromkeys(self.config.layers):
            within = (at < size) & ((at <= at[:, None]) | (not kind.causal)) | (at == at[:, None])
            within = jnp.broadcast_to(within, (batch, count, count))
            masks[kind] = view.masks(context.memory[0], positions, within, kind.window, window)
        by_layer = [masks[kind] for kind in self.config.layers]
        outputs, _ = self.decoder.layers(params, context.memory, view, x, positions, by_layer)
        hidden = self.decoder.norm(params, "model.norm.weight", outputs[-1])[:, first:]
        if "reduced" not in params:
            return hidden, self.target_decoder.head(context.target_params, hidden)
        logits = jnp.einsum("...h,vh->...v", hidden, params["reduced"])
        everywhere = jnp.full((*logits.shape[:-1], self.decoder.config.vocab_size), -jnp.inf, logits.dtype)
        return hidden, everywhere.at[..., params["kept"]].set(logits)
