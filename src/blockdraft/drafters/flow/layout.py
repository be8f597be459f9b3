"""Layout of flow maps: that of DFlash with two more matrices. No other engine reads it."""

from __future__ import annotations

from blockdraft.drafters.dflash.layout import dflash_shapes
from blockdraft.drafters.flow.network import TIME_FEATURES, FlowConfig
from blockdraft.formats.architectures import Architecture, Shapes


def flow_shapes(config: FlowConfig) -> Shapes:
    """Return the shapes of DFlash v1, and of one projection each for states and times."""
    hidden = config.hidden_size
    return dflash_shapes(config) | {
        "state_proj.weight": (hidden, hidden),
        "time_proj.weight": (hidden, TIME_FEATURES),
    }


ARCHITECTURE = Architecture(("FlowMapDraftModel",), FlowConfig, flow_shapes, ("noise_std", "diffusion_steps"))
