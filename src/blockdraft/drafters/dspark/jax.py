"""DSpark in JAX: the draft pass is DFlash's; its heads, which choose one draft token after the other, run in torch."""

from blockdraft.drafters.dflash.jax import JaxDraftPass
from blockdraft.drafters.dspark.network import DSparkNetwork

RUNNERS = {DSparkNetwork: JaxDraftPass}
