"""GGUF files of DFlash, DFlash2 and DSpark, all of llama.cpp's architecture `dflash`.

Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockdraft.formats.architectures import Architecture, LlamaCpp, architecture_of, by_name, tensor_shapes
from blockdraft.formats.base import Borrowed, Checkpoint
from blockdraft.formats.folder import check_tensors
from blockdraft.formats.gguf.files import GGUFFile
from blockdraft.formats.gguf.kinds import HEAD, LIMIT, TOKENS, their_names
from blockdraft.formats.vocabulary import draft_tokens, in_order
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, need

MASK = "tokenizer.ggml.mask_token_id"
NAMES = {
    "hidden_norm.weight": "enc.output_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
# Fields of a configuration, by their GGUF keys without the architecture.
FIELDS = {"block_count": "num_hidden_layers", "block_size": "block_size"}
SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}


class DFlash:
    architecture, layout = "dflash", "zlab"

    def configs(self) -> dict[type, str]:
        return {architecture.config: architecture.names[0] for architecture in _known()}

    def start(self, config: DraftConfig) -> tuple[str, int]:
        return _of_llama_cpp(config).speculator, architecture_of(config).draft_tokens(config)

    def written(self, config: DraftConfig) -> dict[str, Any]:
        causal, windows = {layer.causal for layer in config.layers}, [layer.window for layer in config.layers]
        need(len(causal) == 1, "the layers' causality", [x.causal for x in config.layers], f"the same for all {LIMIT}")
        sizes = {*windows} - {None}
        need(len(sizes) <= 1, "the layers' windows", sorted(sizes, key=str), f"of one size {LIMIT}")
        values = {key: getattr(config, name) for key, name in FIELDS.items()}
        values["attention.causal"] = config.layers[0].causal
        if any(windows):
            values |= {"attention.sliding_window": max(size or 0 for size in windows)}
            values |= {"attention.sliding_window_pattern": [size is not None for size in windows]}
        for key, name in SCALES.items():
            value = getattr(config, name)
            if value is not None and value != getattr(DraftConfig, name):
                values[key] = float(value)
        values |= _of_llama_cpp(config).written(config)
        return {f"{self.architecture}.{key}": value for key, value in values.items()} | {MASK: config.mask_token_id}

    def fields(self, file: GGUFFile) -> tuple[type, dict[str, Any]]:
        prefix = f"{self.architecture}."
        values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        fields = {name: values.get(key) for key, name in FIELDS.items()}
        fields |= {name: values[key] for key, name in SCALES.items() if key in values}
        window, causal = values.get("attention.sliding_window"), bool(values.get("attention.causal"))
        slides = values.get("attention.sliding_window_pattern") or [False] * (values.get("block_count") or 0)
        fields["layers"] = tuple(LayerAttention(causal, window if slid else None) for slid in slides)
        fields["mask_token_id"] = file.metadata.get(MASK)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        for known in sorted(_known(), key=lambda known: -len(known.own_keys())):  # the last known accepts any file
            assert known.llama_cpp is not None
            own = known.llama_cpp.read(values, shapes)
            if own is not None:
                return known.config, fields | own
        raise AssertionError("DFlash v1 accepts any file")

    def names(self, config: DraftConfig) -> dict[str, str]:
        return their_names(tensor_shapes(config), {**NAMES, **_of_llama_cpp(config).names})

    def tensors(self, drafter: Checkpoint) -> dict[str, Tensor]:
        config, own, borrowed = drafter.config, dict(drafter.tensors), drafter.borrowed
        check_tensors(tensor_shapes(config), own)
        names = self.names(config)
        if borrowed is None or borrowed.kept is None:
            return {names[name]: tensor for name, tensor in own.items()}
        assert borrowed.head is not None
        own |= {name: own[name][borrowed.kept] for name in _rows(config)}
        return {names[name]: tensor for name, tensor in own.items()} | {HEAD: borrowed.head, TOKENS: borrowed.kept}

    def checkpoint(self, config: DraftConfig, tensors: Mapping[str, Tensor]) -> Checkpoint:
        own = {ours: tensors[theirs] for ours, theirs in self.names(config).items() if theirs in tensors}
        borrowed = None
        if TOKENS in tensors:
            kept = draft_tokens(tensors[TOKENS] - torch.arange(tensors[TOKENS].numel()), config.vocab_size)
            need(HEAD in tensors, HEAD, None, f"in the file, since {TOKENS} is")
            check_tensors({HEAD: (len(kept), config.hidden_size)}, {HEAD: tensors[HEAD]})
            ascending, head = in_order(kept, tensors[HEAD])  # rows may be in order of frequency
            borrowed = Borrowed(None, head, ascending)
            for name in _rows(config):
                rows = own[name]
                own[name] = rows.new_zeros(config.vocab_size, rows.size(1)).index_copy_(0, kept, rows)
        check_tensors(tensor_shapes(config), own)
        return Checkpoint(config, own, borrowed)


def _known() -> list[Architecture]:
    """Return the architectures that llama.cpp knows."""
    return list({known.config: known for known in by_name().values() if known.llama_cpp is not None}.values())


def _of_llama_cpp(config: DraftConfig) -> LlamaCpp:
    llama_cpp = architecture_of(config).llama_cpp
    assert llama_cpp is not None
    return llama_cpp


def _rows(config: DraftConfig) -> tuple[str, ...]:
    """Return the names of the drafter's own tensors with one matrix row per token of the draft vocabulary."""
    kind = architecture_of(config).speculator
    return () if kind is None else kind.rows


KIND = DFlash()
