"""Flow maps, which no other engine reads."""

from __future__ import annotations

from blockdraft.formats.architectures.base import Architecture, Shapes
from blockdraft.formats.architectures.dflash import dflash_shapes
from blockdraft.nn.draft_config import FlowConfig
from blockdraft.nn.flow import TIME_FEATURES


def flow_shapes(config: FlowConfig) -> Shapes:
    """Flow maps: those of DFlash v1, and one each for states and times."""
    hidden = config.hidden_size
    return dflash_shapes(config) | {
        "state_proj.weight": (hidden, hidden),
        "time_proj.weight": (hidden, TIME_FEATURES),
    }


ARCHITECTURE = Architecture(("FlowMapDraftModel",), FlowConfig, flow_shapes, ("noise_std", "diffusion_steps"))
