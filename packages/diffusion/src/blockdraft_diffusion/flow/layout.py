"""Layout of flow maps, which no other engine reads."""

from __future__ import annotations

from blockdraft.formats.architectures import Architecture
from blockdraft_diffusion.flow.network import FlowNetwork

ARCHITECTURES = (Architecture(("FlowMapDraftModel",), FlowNetwork, ("noise_std", "diffusion_steps")),)
