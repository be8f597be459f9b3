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

    def fuse(self, own: Params, features: Array) -> Array:
        if self.config.fc_norm:
            taps = jnp.split(features, len(self.config.taps), axis=-1)
            features = jnp.concatenate([self.norm(own, f"fc_norm.{i}", tap) for i, tap in enumerate(taps)], axis=-1)
        if self.config.norm_before_fc:
            features = self.norm(own, "input_norm", features)
        return model.linear(own, "model.fc", features)

    def entries(self, own: Params, embedded: Array, features: Array) -> tuple[Array, Array]:
        normed = self.norm(own, "layers.0.hidden_norm", features)
        entries = [self.norm(own, "layers.0.input_layernorm", embedded), normed]
        return normed if self.config.norm_before_residual else features, jnp.concatenate(entries, axis=-1)

    def fed_on(self, own: Params, hidden: Array) -> Array:
        return self.norm(own, "norm", hidden) if self.config.norm_output else hidden

    def logits(self, known: Context, hidden: Array) -> Array:
        return model.linear(known.own, "model.lm_head", self.norm(known.own, "norm", hidden))


RUNNERS = {Eagle3Network: JaxEagle3}
