"""EAGLE-3's network in JAX."""

from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft_jax.autoregressive import JaxAutoregressive
from blockdraft_jax.draft_runner import Context, JaxHost
from blockdraft_jax.model import Array, Params, jnp, linear


class JaxEagle3(JaxAutoregressive):
    config: Eagle3Config

    def __init__(self, network: Eagle3Network, host: JaxHost) -> None:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in network.named_parameters()}
        super().__init__(network, host, tensors, network.config.qk_norm)

    def fuse(self, params: Params, hidden: Array) -> Array:
        if self.config.fc_norm:
            parts = jnp.split(hidden, len(self.config.target_layers), axis=-1)
            hidden = jnp.concatenate([self.norm(params, f"fc_norm.{i}", x) for i, x in enumerate(parts)], axis=-1)
        if self.config.norm_before_fc:
            hidden = self.norm(params, "input_norm", hidden)
        return linear(params, "model.fc", hidden)

    def entries(self, params: Params, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        normed = self.norm(params, "layers.0.hidden_norm", hidden)
        entries = jnp.concatenate([self.norm(params, "layers.0.input_layernorm", embedded), normed], axis=-1)
        return normed if self.config.norm_before_residual else hidden, entries

    def fed_on(self, params: Params, hidden: Array) -> Array:
        return self.norm(params, "norm", hidden) if self.config.norm_output else hidden

    def logits(self, context: Context, hidden: Array) -> Array:
        return linear(context.params, "model.lm_head", self.norm(context.params, "norm", hidden))
