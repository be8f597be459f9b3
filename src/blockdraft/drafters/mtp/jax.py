"""The MTP head in JAX, with a layer of our own; those that lie in a target's folder have the target's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.errors import UsageError
from blockdraft.jax import model
from blockdraft.jax.autoregressive import JaxAutoregressive
from blockdraft.jax.drafting import Context
from blockdraft.jax.model import Array, Params, jnp


class JaxMTP(JaxAutoregressive):
    config: MTPConfig

    def __init__(self, network: MTPNetwork, target: Any, head: Callable[[Tensor], Tensor] | None) -> None:
        if head is not None:
            raise UsageError("JAX runs an MTP head over the target's whole vocabulary only; leave draft_vocab out.")
        super().__init__(network, target, dict(network.named_parameters()))

    def fuse(self, own: Params, hidden_states: Array) -> Array:
        return hidden_states

    def entries(self, own: Params, embedded: Array, hidden_states: Array) -> tuple[Array, Array]:
        both = self.norm(own, "pre_fc_norm_embedding", embedded), self.norm(own, "pre_fc_norm_hidden", hidden_states)
        x = model.linear(own, "model.fc", jnp.concatenate(both, axis=-1))
        return x, self.norm(own, "layers.0.input_layernorm", x)

    def fed_on(self, own: Params, hidden: Array) -> Array:
        return self.norm(own, "norm", hidden) if self.config.normed_feedback else hidden

    def logits(self, known: Context, hidden: Array) -> Array:
        return model.head(self._decoder, self._layout, known.params, self.norm(known.own, "norm", hidden))


RUNNERS = {MTPNetwork: JaxMTP}
