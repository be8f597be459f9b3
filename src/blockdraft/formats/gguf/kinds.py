"""Kinds of drafters that llama.cpp runs, each `KIND` in the `gguf.py` of a drafter's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.gguf.files import GGUFFile
from blockdraft.plugins import parts

OWN = "blockdraft."  # our own keys, which llama.cpp ignores
LIMIT = "in llama.cpp; use another engine"
EMBEDDING, HEAD, TOKENS = "token_embd.weight", "output.weight", "d2t"
# llama.cpp's names of tensors, by their names in folders; those of layers without `blk.N.` and `layers.N.`.
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class Kind(Protocol):
    """Kind of drafter in GGUF files.

    Attributes:
        architecture: llama.cpp's name of the kind.
        layout: Name of the layout of such drafters in folders.
    """

    architecture: str
    layout: str

    def configs(self) -> dict[type, str]:
        """Return the classes of its configurations, and the name of each under `architectures`."""

    def start(self, config: Any) -> tuple[str, int]:
        """Return the value of llama.cpp's `--spec-type`, and the maximum number of draft tokens."""

    def written(self, config: Any) -> dict[str, Any]:
        """Return the metadata specific to this kind. Raise a UsageError if llama.cpp cannot run the drafter."""

    def fields(self, file: GGUFFile) -> tuple[type, dict[str, Any]]:
        """Return the class of a file's configuration and its specific fields, None for missing ones.

        Raises:
            UsageError: The file needs something unsupported.
        """

    def names(self, config: Any) -> dict[str, str]:
        """Return llama.cpp's names of tensors by ours."""

    def tensors(self, drafter: Checkpoint) -> dict[str, Tensor]:
        """Return the tensors by their names in files. Raise a UsageError if they do not fit the configuration."""

    def checkpoint(self, config: Any, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """Return the drafter of a file's tensors, which may hold `EMBEDDING`, `HEAD` and `TOKENS`."""


def their_names(tensors: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return llama.cpp's names of tensors by ours.

    Args:
        own: Names of the kind's own tensors, in addition to `NAMES`.
    """
    names, theirs = NAMES | {**own}, {}
    for name in tensors:
        pieces = name.split(".", 2)
        theirs[name] = f"blk.{pieces[1]}.{names[pieces[2]]}" if pieces[0] == "layers" else names[name]
    return theirs


def kinds() -> list[Kind]:
    return [module.KIND for module in parts("gguf").values()]


def kind_of(config: Any) -> Kind:
    """Return the kind of a configuration. Raise a UsageError if llama.cpp has no such kind."""
    kind = next((kind for kind in kinds() if type(config) in kind.configs()), None)
    if kind is None:
        known = (name for kind in kinds() for name in kind.configs().values())
        raise UsageError(
            f"The kind of drafter is {type(config).__name__.removesuffix('Config')!r}; llama.cpp drafts with files of "
            f"{', '.join(known)} alone. Train one of these (`blockdraft train`), or serve it with `blockdraft serve`."
        )
    return kind


def kind_in(file: GGUFFile) -> Kind:
    """Return the kind of the drafter in a file. Raise a UsageError if it holds no drafter."""
    architecture = file.metadata.get("general.architecture")
    kind = next((kind for kind in kinds() if kind.architecture == architecture), None)
    if kind is None:
        known = " or ".join(kind.architecture for kind in kinds())
        raise UsageError(
            f"{file.path} is no drafter: its architecture is {architecture}, and neither {known} nor that of a "
            "language model that can be run."
        )
    return kind
