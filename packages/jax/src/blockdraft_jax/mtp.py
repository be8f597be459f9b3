"""MTP heads in JAX that were trained here. Those of a target's folder have the target's layer, and run in torch."""

from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.errors import UsageError
from blockdraft_jax.autoregressive import JaxAutoregressive
from blockdraft_jax.draft_runner import Context, JaxHost
from blockdraft_jax.model import Array, Params, jnp, linear


class JaxMTP(JaxAutoregressive):
    config: MTPConfig

    def __init__(self, network: MTPNetwork, host: JaxHost) -> None:
        if host.own_head is not None:
            raise UsageError("JAX runs an MTP head over the target's whole vocabulary only; omit draft_vocab.")
        super().__init__(network, host, dict(network.named_parameters()))

    def fuse(self, params: Params, hidden: Array) -> Array:
        return hidden

    def entries(self, params: Params, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        both = self.norm(params, "pre_fc_norm_embedding", embedded), self.norm(params, "pre_fc_norm_hidden", hidden)
        x = linear(params, "model.fc", jnp.concatenate(both, axis=-1))
        return x, self.norm(params, "layers.0.input_layernorm", x)

    def fed_on(self, params: Params, hidden: Array) -> Array:
        return self.norm(params, "norm", hidden) if self.config.normed_feedback else hidden

    def logits(self, context: Context, hidden: Array) -> Array:
        return self.target_decoder.head(context.target_params, self.norm(context.params, "norm", hidden))
