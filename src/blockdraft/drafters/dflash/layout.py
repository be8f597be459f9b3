"""Layouts of DFlash v1."""

from __future__ import annotations

from blockdraft.drafters.dflash.network import DFlashNetwork
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
ARCHITECTURES = (DFLASH,)
