"""What can be said of a drafter: its conventions, the target that it wants, and whether a given one is that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blockdraft.formats import Layout, trained_for
from blockdraft.formats.architectures import architecture_of, tensor_shapes
from blockdraft.formats.engines import starts
from blockdraft.formats.folder import blaming, folder_tensors, weight_files
from blockdraft.formats.gguf import GGUFFile
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained_for
from blockdraft.inspection.base import Check, Report
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import Description

TOKENS = "tokenizer.ggml.tokens"
# What is said of a drafter's size, by the field of its configuration, where that has one.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "context": "max_position_embeddings",
}
HEAD_INPUT = "what the target's head reads, after its last norm"


@dataclass(frozen=True)
class Found:
    """A drafter's files, read but for the weights.

    Attributes:
        config: Of its network.
        architecture: As config.json names it.
        guesses: Most guesses of a block.
        kept: Tokens that it can guess.
        layers_known: Whether the files, or a target, say how many layers the target has.
        weights: How many numbers there are of each type.
        name, fingerprint: Of its target, where they are said.
        words: The tokens of its vocabulary, where it holds them.
    """

    path: str
    layout: str
    config: Any
    architecture: str
    parameters: int
    guesses: int
    kept: int
    layers_known: bool
    weights: Mapping[str, int]
    bytes: int
    name: str | None
    fingerprint: str | None
    words: list[str] | None = None


def layout_report(path: Path, name: str, layout: Layout, raw: Mapping[str, Any], target: Description | None) -> Report:
    """A folder of one of the layouts. Raises UsageError where it is incomplete or asks for the unsupported."""
    files, tensors = weight_files(path, layout.pickle), folder_tensors(path, layout.pickle)
    vocabulary = target.text.tokenizer.get_vocab() if target is not None and target.text.tokenizer else None
    with blaming(path / "config.json"):
        config, layers_known = layout.config(raw, tensors, vocabulary, None if target is None else _layers(target))
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    if layout.kind is None:
        architecture = architecture_of(config)
        own = architecture.names[0], _count(tensor_shapes(config)), architecture.guesses(config)
    else:
        own = layout.kind.name, _count(layout.kind.shapes(config)), layout.kind.guesses(config)
    return _report(
        Found(
            str(path),
            name,
            config,
            *own,
            kept=int(raw.get("draft_vocab_size") or config.vocab_size),
            layers_known=layers_known,
            weights=_by_kind((tensor.kind, tensor.shape) for tensor in tensors.values()),
            bytes=sum(file.stat().st_size for file in files),
            name=verifier.get("name_or_path") or raw.get("base_model_name_or_path"),
            fingerprint=trained_for(raw),
        ),
        target,
    )


def gguf_report(file: GGUFFile, target: Description | None) -> Report:
    """A GGUF file. Raises UsageError where it lacks a value or asks for the unsupported."""
    entered = file.metadata.get("dflash.target_layers") or [0]
    own = file.metadata.get("blockdraft.num_target_layers")
    known = own or (None if target is None else _layers(target))
    config = drafter_config(file, known or max(entered) + 1)
    architecture = architecture_of(config)
    return _report(
        Found(
            str(file.path),
            "gguf",
            config,
            architecture.names[0],
            _count(tensor_shapes(config)),
            architecture.guesses(config),
            kept=file.tensors["d2t"].shape[0] if "d2t" in file.tensors else config.vocab_size,
            layers_known=known is not None,
            weights=_by_kind((tensor.kind, tensor.shape) for tensor in file.tensors.values()),
            bytes=sum(part.stat().st_size for part in file.parts),
            name=None,
            fingerprint=gguf_trained_for(file),
            words=file.metadata[TOKENS],
        ),
        target,
    )


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _by_kind(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for kind, shape in tensors:
        kinds[kind] = kinds.get(kind, 0) + math.prod(shape)
    return kinds


def _report(found: Found, target: Description | None) -> Report:
    config = found.config
    about: dict[str, Any] = {"architecture": found.architecture}
    about |= {name: getattr(config, field) for name, field in SIZES.items() if hasattr(config, field)}
    about |= {"parameters": found.parameters, "weights": dict(found.weights), "bytes": found.bytes}
    if hasattr(config, "num_key_value_heads"):
        values = 2 * getattr(config, "num_hidden_layers", 1) * config.num_key_value_heads * config.head_dim
        about["key_value_bytes_per_token"] = {"float32": 4 * values, "bfloat16": 2 * values}
    wants = {
        "name": found.name,
        "layers": config.num_target_layers if found.layers_known else None,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "fingerprint": found.fingerprint,
    }
    checks = () if target is None else tuple(_checks(found, target))
    named = str(found.name or "TARGET") if target is None else target.path
    is_file = target is not None and named.endswith(".gguf")
    lines = starts(
        config,
        found.layout,
        found.path,
        "TARGET" if is_file else named,
        ["--target", named],
        named if is_file else None,
    )
    said = _conventions(found, target)
    return Report(found.path, "drafter", found.layout, about, wants, said, checks, lines, config)


def _conventions(found: Found, target: Description | None) -> dict[str, Any]:
    config = found.config
    said: dict[str, Any] = {
        "block_size": getattr(config, "block_size", found.guesses + 1),
        "guesses": found.guesses,
        "taps": {"blockdraft": [HEAD_INPUT]} if _reads_head_input(config) else _numbered(config.taps),
    }
    if isinstance(config, DraftConfig):
        said["layers"] = [{"causal_in_block": layer.causal, "window": layer.window} for layer in config.layers]
    if hasattr(config, "rope_theta"):
        said["rope"] = {"theta": config.rope_theta, "scaling": config.rope_scaling}
    if isinstance(config, DraftConfig):
        word = _word(config.mask_token_id, found.words, target)
        said["mask_token"] = {"id": config.mask_token_id, "token": word}
    said["vocabulary"] = {"target": config.vocab_size, "guessed": found.kept}
    if isinstance(config, DraftConfig):
        said["embedding_scale"] = config.input_embedding_scale
        said["logits_multiplier"] = config.output_multiplier
        said["logits_softcap"] = config.final_logit_softcapping
    common = {field.name for field in fields(DraftConfig)} | {"draft_vocab_size"}
    own = {name: getattr(config, name) for name in sorted({field.name for field in fields(config)} - common)}
    return said | ({found.architecture: own} if own else {})


def _numbered(taps: Sequence[int]) -> dict[str, list[int]]:
    """Taps as the engines number them."""
    left, entered = [*taps], [tap + 1 for tap in taps]
    ours = dict.fromkeys(("blockdraft", "zlab"), left)
    return ours | dict.fromkeys(("vllm_sglang", "speculators", "llama_cpp"), entered)


def _reads_head_input(config: Any) -> bool:
    return bool(config.taps == (config.num_target_layers,))


def _layers(target: Description) -> int:
    return int(target.config.num_hidden_layers)


def _word(number: int, words: list[str] | None, target: Description | None) -> str | None:
    if words is not None:
        return words[number] if number < len(words) else None
    if target is None or target.text.tokenizer is None:
        return None
    found: Any = target.text.tokenizer.convert_ids_to_tokens(number)
    return None if found is None else str(found)


def _checks(found: Found, target: Description) -> list[Check]:
    config = found.config
    theirs = {"hidden size": target.config.hidden_size, "vocabulary": target.config.vocab_size}
    ours = {"hidden size": config.hidden_size, "vocabulary": config.vocab_size}
    if found.layers_known:
        theirs["layers"], ours["layers"] = _layers(target), config.num_target_layers
    checks = [
        Check(name, ours[name] == theirs[name], f"{ours[name]} here, {theirs[name]} in the target") for name in ours
    ]
    if not _reads_head_input(config):
        inside = max(config.taps) < _layers(target)
        checks.append(Check("taps", inside, f"the highest is {max(config.taps)} of {_layers(target)} layers, from 0"))
    if hasattr(config, "max_position_embeddings"):
        longest = target.text.max_context
        told = f"{config.max_position_embeddings} here, {longest} in the target"
        checks.append(Check("context", config.max_position_embeddings >= longest, told))
    checks.append(_tokenizer(found.words, target))
    if isinstance(config, DraftConfig):
        checks.append(_mask(config, target))
    own = target.fingerprint()
    same = None if found.fingerprint is None or own is None else found.fingerprint == own
    said = f"{found.fingerprint or 'not known'} here, {own or 'not known'} in the target"
    return [*checks, Check("fingerprint", same, said)]


def _tokenizer(words: list[str] | None, target: Description) -> Check:
    if words is None:
        return Check("tokenizer", None, "the drafter holds none")
    if target.text.tokenizer is None:
        return Check("tokenizer", None, "the target has none")
    wrong = [
        token for token, number in target.text.tokenizer.get_vocab().items() if words[number : number + 1] != [token]
    ]
    said = "the same tokens" if not wrong else f"{len(wrong)} tokens differ, such as {wrong[0]!r}"
    return Check("tokenizer", not wrong, said)


def _mask(config: DraftConfig, target: Description) -> Check:
    """The mask stands for what is not said yet, so no text should hold it."""
    ends = config.mask_token_id in target.text.eos_token_ids
    word = _word(config.mask_token_id, None, target)
    said = f"{config.mask_token_id} is {'no token of its tokenizer' if word is None else repr(word)}"
    return Check("mask token", not ends, f"{said}{', which ends answers' if ends else ''}")
