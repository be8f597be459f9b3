"""Tensors of checkpoints with Mamba-2 layers, by the names of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blockdraft.formats.stored import StoredTensor
from blockdraft.targets.model_config import AnyConfig

# Parts of Granite's names behind the number of a layer, and ours. Files hold gate and up projections in one matrix.
GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
}
GRANITE_SHARED = "shared_mlp."  # the MLP of layers without experts
# Parts of Nemotron-H's names, and ours. Each layer has one norm, and one of attention, Mamba-2, MLP and experts.
NEMOTRON_NAMES = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    (".mixer.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".mixer.gate.", ".mlp.gate."),
    (".mixer.shared_experts.", ".mlp.shared_expert."),
    (".mixer.experts.", ".mlp.experts."),
    *((f".mixer.{part}_proj.", f".self_attn.{part}_proj.") for part in "qkvo"),
    *((f".mixer.{part}_proj.", f".mlp.{part}_proj.") for part in ("up", "down")),
    (".mixer.", ".mamba."),
)


def granite_hybrid_tensors(tensors: Mapping[str, StoredTensor], config: AnyConfig) -> dict[str, StoredTensor]:
    """Return tensors under our names. Tensors with our names stay as they are."""
    mlp = "mlp.shared_expert." if config.num_local_experts else "mlp."
    own = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        place, shared, part = name.partition(GRANITE_SHARED)
        layer = ".".join(name.split(".")[:3])
        known = GRANITE_EXPERTS.get(name.removeprefix(f"{layer}."))
        if shared and part == "input_linear.weight":
            gate, up = torch.arange(tensor.shape[0]).chunk(2)
            own[f"{place}{mlp}gate_proj.weight"], own[f"{place}{mlp}up_proj.weight"] = (
                tensor.rows(gate),
                tensor.rows(up),
            )
        elif shared:
            own[f"{place}{mlp}down_proj.weight"] = tensor
        else:
            own[name if known is None else f"{layer}.{known}"] = tensor
    return own


def nemotron_h_tensors(tensors: Mapping[str, StoredTensor], config: AnyConfig) -> dict[str, StoredTensor]:
    """Return tensors under our names. Tensors with our names stay as they are."""
    own = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        spelled = name
        for theirs, ours in NEMOTRON_NAMES:
            spelled = spelled.replace(theirs, ours)
        layer, _, part = spelled.partition(".norm.weight")
        if layer.rpartition(".")[2].isdigit() and not part:
            spelled = f"{layer}.input_layernorm.weight"
        own[spelled] = tensor
    return own
