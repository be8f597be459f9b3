"""Multi-token prediction (MTP) head as drafter.

One layer drafts one token after the other, first from the target's last hidden state, then from its own output, like
EAGLE-3. It has its own folder, or is in the target's folder or GGUF file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from blockdraft.drafters.base import DraftCost, DrafterSpec, read_network
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.mtp.decoder_network import DecoderMTPNetwork
from blockdraft.drafters.mtp.in_target import find_head, holds_head
from blockdraft.drafters.mtp.network import MTPHead, MTPNetwork
from blockdraft.drafters.mtp.target_network import TargetMTPConfig, TargetMTPNetwork, one_layer
from blockdraft.errors import UsageError
from blockdraft.formats.folder import blaming
from blockdraft.formats.gguf import gguf_outline, is_gguf
from blockdraft.nn.packed import PackedLinear
from blockdraft.targets import DecoderHead, Target, has_head, read_decoder_head, read_gguf_head, runs_heads

# Model types with supported heads. In all of them, the next step reads the output of the last norm.
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MTPDrafter(Eagle3Drafter):
    """Drafts with an MTP head, whose embedding and output projection are the target's."""

    has_target_head = True

    def weight_bytes(self) -> int:
        products = (module for module in self.network.modules() if isinstance(module, PackedLinear))
        return super().weight_bytes() + sum(product.nbytes for product in products if product.bits is not None)


def load_mtp(path: Path | None, target: Target) -> MTPDrafter:
    """Load the head in a folder; None is the target's folder or GGUF file."""
    if path is None:
        return MTPDrafter(own_head(target), target)
    return MTPDrafter(read_network(path, target, lambda config: config.network()), target, path, owned=True)


def own_head(target: Target) -> MTPHead:
    """Load the network of the MTP head in the target's folder or GGUF file.

    Raises:
        UsageError: The target has neither, or there is no head, a broken one, or one of an unsupported family.
    """
    folder = target.path
    if folder is not None and is_gguf(folder):
        return _of_decoder(read_gguf_head(target))
    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(
            f"The drafter mtp is the MTP head in the target's folder, and {folder or 'the target'} is no folder with a "
            "config.json; load the target from a folder with its published files (hf download NAME --local-dir DIR), "
            "or use another drafter."
        )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"{folder} is of the family {config.model_type}, whose MTP heads are not supported; those of "
            f"{', '.join(FAMILIES)} are. Use another drafter, such as a head that blockdraft train mtp trains."
        )
    head = find_head(folder, target.num_layers)
    if runs_heads(target):
        return _of_decoder(read_decoder_head(target, folder, *head.parts))
    mtp_config = TargetMTPConfig(layer=one_layer(config, head.has_experts), num_target_layers=target.num_layers)
    with torch.device("meta"):
        network = TargetMTPNetwork(mtp_config)
    with blaming(folder):
        tensors = head.read({name: tuple(tensor.shape) for name, tensor in network.state_dict().items()})
    network.load_state_dict(tensors, assign=True)
    return network.to(target.device, target.dtype)


def in_target(target: Target) -> bool:
    """Return whether a target holds a head of a supported family that runs compiled for it."""
    path = target.path
    if path is None or not runs_heads(target):
        return False
    if is_gguf(path):
        return has_head(gguf_outline(path))
    if not (path / "config.json").is_file() or not holds_head(path, target.num_layers):
        return False
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config(decoder=True).model_type in FAMILIES


def _of_decoder(head: DecoderHead) -> DecoderMTPNetwork:
    return DecoderMTPNetwork(head.config, head.layer, head.fc, head.norms)


DRAFTER = DrafterSpec(
    load_mtp,
    architectures=("MTPDraftModel",),
    by_name=True,
    network=MTPNetwork,
    layouts=("mtp", "mtp_speculators"),
    drafter=MTPDrafter,
    cost=DraftCost(layers=1, block_size=4, serial=True),
    in_target=in_target,
)
