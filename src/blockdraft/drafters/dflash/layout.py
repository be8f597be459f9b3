"""Layouts of DFlash v1 and of flow maps."""

from __future__ import annotations

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.flow.network import FlowNetwork
from blockdraft.formats.architectures import Architecture, LlamaCpp, Speculator

DFLASH = Architecture(
    ("DFlashDraftModel",),
    DFlashNetwork,
    speculator=Speculator("dflash", "DFlashSpeculator"),
    llama_cpp=LlamaCpp("draft-dflash"),
    vllm="dflash",
    sglang="DFLASH",
    tensorrt_llm="DFlash",
    openvino=True,
)
# No other engine reads flow maps.
FLOW = Architecture(("FlowMapDraftModel",), FlowNetwork, ("noise_std", "diffusion_steps"))
ARCHITECTURES = (DFLASH, FLOW)
