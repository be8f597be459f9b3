"""GGUF files of EAGLE-3.

The drafter has its own head; with a draft vocabulary, `d2t` holds the target's ids of its tokens. The embedding is the
target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters.eagle3.layout import ARCHITECTURE_NAMES, TABLE, TIED, checkpoint_of, tensor_shapes
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, Eagle3Config
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import check_tensors
from blockdraft.formats.gguf.files import GGUFFile
from blockdraft.formats.gguf.kinds import EMBEDDING, HEAD, LIMIT, OWN, TOKENS, their_names
from blockdraft.formats.gguf.rope import paired
from blockdraft.nn.draft_config import need

NAMES = {
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "lm_head.weight": HEAD,
}
TARGET_LAYERS, BLOCK = 3, f"{OWN}block_size"
FLAGS = ("norm_before_residual", "norm_before_fc")
# Flags that llama.cpp does not know. It refuses a file with one of them, since tensors have names of our own.
OWN_FLAGS = ("norm_output", "fc_norm")
NOT_THERE = ("qk_norm",)


class Eagle3Kind:
    architecture, layout = "eagle3", "eagle3"

    def configs(self) -> dict[type, str]:
        return {Eagle3Config: ARCHITECTURE_NAMES[0]}

    def start(self, config: Eagle3Config) -> tuple[str, int]:
        for name in OWN_FLAGS:
            need(not getattr(config, name), name, True, f"false {LIMIT}")
        return "draft-eagle3", config.block_size - 1

    def written(self, config: Eagle3Config) -> dict[str, Any]:
        need(
            len(config.target_layers) == TARGET_LAYERS,
            "the number of target layers",
            len(config.target_layers),
            f"{TARGET_LAYERS} {LIMIT}",
        )
        for name in NOT_THERE:
            need(not getattr(config, name), name, True, f"false {LIMIT}")
        values = {"block_count": 1, **{name: getattr(config, name) for name in FLAGS}}
        own = {OWN + name: True for name in (*OWN_FLAGS, TIED) if getattr(config, name)}
        return {f"{self.architecture}.{key}": value for key, value in values.items()} | {
            BLOCK: config.block_size,
            **own,
        }

    def fields(self, file: GGUFFile) -> tuple[type, dict[str, Any]]:
        depth = file.metadata.get(f"{self.architecture}.block_count")
        need(depth == 1, f"{self.architecture}.block_count", depth, "1; no other is supported")
        need(HEAD in file.tensors, HEAD, None, "in the file; use llama.cpp for this drafter")
        flags = {name: file.metadata.get(f"{self.architecture}.{name}", False) for name in FLAGS}
        flags |= {name: file.metadata.get(OWN + name, False) for name in (*OWN_FLAGS, TIED)}
        size = file.metadata.get(BLOCK, BLOCK_SIZE)
        return Eagle3Config, {**flags, "draft_vocab_size": file.tensors[HEAD].shape[0], "block_size": size}

    def names(self, config: Eagle3Config) -> dict[str, str]:
        ours = [name for name in tensor_shapes(config) if name != TOKENS]
        own = {name: OWN + name for name in ours if name.startswith("fc_norm.")}
        if config.norm_output:
            own["norm.weight"] = f"{OWN}norm.weight"
        theirs = their_names([name.replace("midlayer.", "layers.0.") for name in ours], NAMES | own)
        return dict(zip(ours, theirs.values(), strict=True))

    def tensors(self, drafter: Checkpoint) -> dict[str, Tensor]:
        config, own = drafter.config, drafter.tensors
        check_tensors(tensor_shapes(config), own)
        file_tensors = {theirs: own[ours] for ours, theirs in self.names(config).items()}
        for name, heads in _interleaved(config).items():
            file_tensors[name] = file_tensors[name][paired(len(file_tensors[name]), heads).argsort()]
        if config.draft_vocab_size < config.vocab_size:
            file_tensors[TOKENS] = own[TOKENS] + torch.arange(config.draft_vocab_size)
        return file_tensors

    def checkpoint(self, config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Checkpoint:
        file_tensors = dict(tensors)
        for name, heads in _interleaved(config).items():
            if name in file_tensors:
                file_tensors[name] = file_tensors[name][paired(len(file_tensors[name]), heads)]
        own = {ours: file_tensors[theirs] for ours, theirs in self.names(config).items() if theirs in file_tensors}
        if TOKENS in file_tensors:
            own[TOKENS] = file_tensors[TOKENS] - torch.arange(file_tensors[TOKENS].numel())
        if EMBEDDING in file_tensors:
            own[TABLE] = file_tensors[EMBEDDING]
        return checkpoint_of(config, own)


def _interleaved(config: Eagle3Config) -> dict[str, int]:
    """Return the number of heads of each tensor whose matrix rows llama.cpp orders in rotary pairs."""
    return {"blk.0.attn_q.weight": config.num_attention_heads, "blk.0.attn_k.weight": config.num_key_value_heads}


KIND = Eagle3Kind()
