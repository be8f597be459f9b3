"""What can be said of a drafter: its conventions, the target that it wants, and whether a given one is that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.formats import Layout, trained_for
from blockdraft.formats.architectures import architecture_of, tensor_shapes
from blockdraft.formats.folder import blaming, open_folder, weight_files
from blockdraft.formats.gguf import GGUFFile
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained_for
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.formats.speculators_config import target_said
from blockdraft.inspection.base import Check, Report
from blockdraft.inspection.fits import checks_of, layers_of, same_mask, same_tokenizer, word_of
from blockdraft.inspection.heads import head_report
from blockdraft.inspection.lines import lines_of
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import Description

TOKENS = "tokenizer.ggml.tokens"


def layout_report(path: Path, name: str, layout: Layout, raw: Mapping[str, Any], target: Description | None) -> Report:
    """A folder of one of the layouts. Raises UsageError where it is incomplete or asks for the unsupported."""
    files = weight_files(path, layout.pickle)
    if not files:
        raise UsageError(f"{path} has no weights (*.safetensors) beside config.json; copy them there.")
    vocabulary = target.text.tokenizer.get_vocab() if target is not None and target.text.tokenizer else None
    with blaming(path):
        tensors = open_folder(path, layout.pickle)
    with blaming(path / "config.json"):
        config, layers_known = layout.config(raw, tensors, vocabulary, None if target is None else layers_of(target))
    kinds: dict[str, int] = {}
    for tensor in tensors.values():
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
    kept = raw.get("draft_vocab_size") or config.vocab_size
    size = sum(file.stat().st_size for file in files)
    with blaming(path / "config.json"):
        named = target_said(raw) or raw.get("base_model_name_or_path")
    wants = {"name": named, "fingerprint": trained_for(raw)}
    if isinstance(config, DraftConfig):
        return _report(str(path), name, config, layers_known, kinds, size, int(kept), wants, target, None)
    architecture = next(entry for entry in entries().values() if name in entry.layouts).architectures[0]
    return head_report(str(path), name, architecture, config, layers_known, kinds, size, int(kept), wants, target)


def _checks(
    config: DraftConfig,
    layers_known: bool,
    fingerprint: str | None,
    words: list[str] | None,
    target: Description | None,
) -> tuple[Check, ...]:
    if target is None:
        return ()
    *found, last = checks_of(config, config.taps, layers_known, fingerprint, target)
    return (*found, same_tokenizer(words, target), same_mask(config, target), last)


def gguf_report(file: GGUFFile, target: Description | None) -> Report:
    """A GGUF file. Raises UsageError where it lacks a value or asks for the unsupported."""
    kind = kind_in(file)
    entered = file.metadata.get(f"{kind.architecture}.target_layers") or [0]
    own = file.metadata.get("blockdraft.num_target_layers")
    known = own or (None if target is None else layers_of(target))
    config = drafter_config(file, known or max(entered) + 1)
    kinds: dict[str, int] = {}
    for tensor in file.tensors.values():
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
    kept = file.tensors["d2t"].shape[0] if "d2t" in file.tensors else config.vocab_size
    size = sum(part.stat().st_size for part in file.parts)
    wants = {"name": None, "fingerprint": gguf_trained_for(file)}
    words = file.metadata[TOKENS]
    said = config, known is not None, kinds, size, kept, wants, target, words
    if isinstance(config, DraftConfig):
        return _report(str(file.path), "gguf", *said)
    return head_report(str(file.path), "gguf", kind.configs()[type(config)], *said)


def _report(
    path: str,
    layout: str,
    config: DraftConfig,
    layers_known: bool,
    kinds: Mapping[str, int],
    size: int,
    kept: int,
    wants: dict[str, Any],
    target: Description | None,
    words: list[str] | None,
) -> Report:
    architecture = architecture_of(config)
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    about = {
        "architecture": architecture.names[0],
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "context": config.max_position_embeddings,
        "parameters": sum(math.prod(shape) for shape in tensor_shapes(config).values()),
        "weights": dict(kinds),
        "bytes": size,
        "key_value_bytes_per_token": {"float32": 4 * values, "bfloat16": 2 * values},
    }
    own = {name: getattr(config, name) for name in sorted(architecture.own_keys())}
    taps, entered = [*config.taps], [tap + 1 for tap in config.taps]
    conventions = {
        "block_size": config.block_size,
        "guesses": architecture.guesses(config),
        "taps": {
            "blockdraft": taps,
            "zlab": taps,
            "vllm_sglang": entered,
            "speculators": entered,
            "llama_cpp": entered,
        },
        "layers": [{"causal_in_block": layer.causal, "window": layer.window} for layer in config.layers],
        "rope": {"theta": config.rope_theta, "scaling": config.rope_scaling},
        "mask_token": {"id": config.mask_token_id, "token": word_of(config.mask_token_id, words, target)},
        "vocabulary": {"target": config.vocab_size, "guessed": kept},
        "embedding_scale": config.input_embedding_scale,
        "logits_multiplier": config.output_multiplier,
        "logits_softcap": config.final_logit_softcapping,
        **({architecture.names[0]: own} if own else {}),
    }
    wants = {
        "name": wants["name"],
        "layers": config.num_target_layers if layers_known else None,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "fingerprint": wants["fingerprint"],
    }
    checks = _checks(config, layers_known, wants["fingerprint"], words, target)
    lines = lines_of(config, layout, path, wants["name"], target)
    return Report(path, "drafter", layout, about, wants, conventions, checks, lines, config)
