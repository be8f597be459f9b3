"""Layout of DFlash2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.formats.architectures import Architecture, LlamaCpp, Shapes
from blockdraft.nn.draft_config import need

# Fields that z-lab's files and their readers keep in `dflash_config`.
NESTED: tuple[str, ...] = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NESTED += ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def _adapted(config: DFlash2Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in z-lab's form.

    Some trainers keep the codebooks in embedding layers. Some keep base kernels without the dimension of the sides:
    either one kernel for both, or the taps of both concatenated.
    """
    adapted = dict(tensors)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        if f"{name}.weight" in adapted and name not in adapted:
            adapted[name] = adapted.pop(f"{name}.weight")
    taps, hidden = config.conv_kernel_size, config.hidden_size
    for name in _convolutions(config):
        kernel = adapted.get(f"{name}.base_kernel")
        if kernel is not None and kernel.shape in ((taps, hidden), (2 * taps, hidden)):
            adapted[f"{name}.base_kernel"] = kernel.view(-1, taps, hidden).expand(2, -1, -1)
    return adapted


def _convolutions(config: DFlash2Config) -> list[str]:
    return [f"layers.{i}.{part}_conv" for i in range(config.num_hidden_layers) for part in ("attention", "mlp")]


LLAMA_CPP = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # llama.cpp's keys, and fields


def _written(config: DFlash2Config) -> dict[str, Any]:
    top, hidden = config.selector_top_k, config.hidden_size
    least = top * (top + 1)  # llama.cpp returns these numbers of a position instead of its hidden state
    need(hidden >= least, "hidden_size", hidden, f"at least {least} in llama.cpp where selector_top_k is {top}")
    return {name: getattr(config, name) for name in SELECTOR}


def _read(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any] | None:
    return {name: values.get(name) for name in SELECTOR} if "selector_hidden.weight" in shapes else None


ARCHITECTURES = (
    Architecture(
        ("DFlash2DraftModel",),
        DFlash2Network,
        NESTED,
        _adapted,
        llama_cpp=LlamaCpp("draft-dflash", LLAMA_CPP, _written, _read),
        vllm="dflash",
    ),
)
