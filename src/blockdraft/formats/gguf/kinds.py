"""Kinds of drafters that llama.cpp has: `KIND` in `gguf.py` of a drafter's folder, and what kinds share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.gguf.files import GGUFFile
from blockdraft.plugins import parts

OWN = "blockdraft."  # keys of ours, which llama.cpp does not look at
LIMIT = "in llama.cpp; use another engine"
EMBEDDING, HEAD, TOKENS = "token_embd.weight", "output.weight", "d2t"
# From names of tensors in folders to those of llama.cpp; of layers without `layers.N.` and `blk.N.`.
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
    """Attributes:
    architecture: What llama.cpp calls it.
    layout: The layout in which such drafters lie in folders: a file of `formats`.
    """

    architecture: str
    layout: str

    def configs(self) -> dict[type, str]:
        """The classes of its configurations, and what config.json calls each under `architectures`."""

    def start(self, config: Any) -> tuple[str, int]:
        """llama.cpp's `--spec-type`, and the most guesses of a block."""

    def written(self, config: Any) -> dict[str, Any]:
        """Its own values by their keys. Raises UsageError for what llama.cpp cannot run."""

    def fields(self, file: GGUFFile) -> tuple[type, dict[str, Any]]:
        """The class of a configuration, and its own fields, None for those that are not in the file. Raises UsageError
        for the unsupported."""

    def names(self, config: Any) -> dict[str, str]:
        """llama.cpp's names of tensors, by ours."""

    def tensors(self, drafter: Checkpoint) -> dict[str, Tensor]:
        """A drafter's, by their names in files. Raises ValueError where they do not fit its configuration."""

    def checkpoint(self, config: Any, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """The other way round; also of `EMBEDDING`, `HEAD` and `TOKENS`, where a file holds them."""


def their_names(tensors: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """llama.cpp's names of tensors, by ours.

    Args:
        own: Names that the kind has besides `NAMES`.
    """
    names, found = NAMES | {**own}, {}
    for name in tensors:
        parts = name.split(".", 2)
        found[name] = f"blk.{parts[1]}.{names[parts[2]]}" if parts[0] == "layers" else names[name]
    return found


def kinds() -> list[Kind]:
    return [module.KIND for module in parts("gguf").values()]


def kind_of(config: Any) -> Kind:
    """The kind that a configuration belongs to. Raises UsageError where llama.cpp has none."""
    found = next((kind for kind in kinds() if type(config) in kind.configs()), None)
    if found is None:
        known = (name for kind in kinds() for name in kind.configs().values())
        raise UsageError(
            f"The kind of drafter is {type(config).__name__.removesuffix('Config')!r}; llama.cpp drafts with files of "
            f"{', '.join(known)} alone. Train one of these (`blockdraft train`), or serve it with `blockdraft serve`."
        )
    return found


def kind_in(file: GGUFFile) -> Kind:
    """The kind that a file holds. Raises UsageError where it is no drafter."""
    found = file.metadata.get("general.architecture")
    kind = next((kind for kind in kinds() if kind.architecture == found), None)
    if kind is None:
        known = " or ".join(kind.architecture for kind in kinds())
        raise UsageError(f"{file.path} is no drafter: its architecture is {found} instead of {known}.")
    return kind
