"""DSpark in JAX: the draft pass is DFlash's; its heads, which go from guess to guess, run in torch on the host."""

from blockdraft.drafters.dflash.jax import JaxDraftPass


class JaxDSparkPass(JaxDraftPass):
    """A `DraftRunner` of the network without its heads."""

    cycle = None  # type: ignore[assignment]
