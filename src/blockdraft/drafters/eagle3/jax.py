"""EAGLE-3's network in JAX."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.jax import model
from blockdraft.jax.autoregressive import JaxAutoregressive
from blockdraft.jax.drafting import Context
from blockdraft.jax.model import Array, Params, jnp


class JaxEagle3(JaxAutoregressive):
    config: Eagle3Config

    def __init__(self, network: Eagle3Network, target: Any, head: Callable[[Tensor], Tensor] | None) -> None:
        tensors = {name.replace("midlayer.", "layers.0."): each for name, each in network.named_parameters()}
        super().__init__(network, target, tensors, network.config.qk_norm)

    def fuse(self, own: Params, hidden_states: Array) -> Array:
        if self.config.fc_norm:
            target_layers = jnp.split(hidden_states, len(self.config.target_layers), axis=-1)
            hidden_states = jnp.concatenate(
                [self.norm(own, f"fc_norm.{i}", target_layer) for i, target_layer in enumerate(target_layers)], axis=-1
            )
        if self.config.norm_before_fc:
            hidden_states = self.norm(own, "input_norm", hidden_states)
        return model.linear(own, "model.fc", hidden_states)

    def entries(self, own: Params, embedded: Array, hidden_states: Array) -> tuple[Array, Array]:
        normed = self.norm(own, "layers.0.hidden_norm", hidden_states)
        entries = [self.norm(own, "layers.0.input_layernorm", embedded), normed]
        return normed if self.config.norm_before_residual else hidden_states, jnp.concatenate(entries, axis=-1)

    def fed_on(self, own: Params, hidden: Array) -> Array:
        return self.norm(own, "norm", hidden) if self.config.norm_output else hidden

    def logits(self, known: Context, hidden: Array) -> Array:
        return model.linear(known.own, "model.lm_head", self.norm(known.own, "norm", hidden))


RUNNERS = {Eagle3Network: JaxEagle3}
