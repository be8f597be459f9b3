"""Checkpoints of targets whose tensors are read one at a time, to write them in another form."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import FLOATS, GGUFFile, is_gguf, open_gguf
from blockdraft.formats.gguf.rope import ROPE_FACTORS
from blockdraft.formats.stored import FEW_BITS, MadeTensor, StoredTensor, dense
from blockdraft.models import located
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind
from blockdraft.targets.base import NotCovered
from blockdraft.targets.checkpoint import checked_folder, find_file, loading
from blockdraft.targets.families import decoder_config, text_part
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.gguf.checkpoint import find_tokenizer, refuse, understanding
from blockdraft.targets.gguf.config import gguf_config, long_rope
from blockdraft.targets.gguf.tensors import GGUFWeights, decoder_weights, fitted
from blockdraft.targets.gguf.tokenizer import end_ids
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.targets.weights import open_weights
from blockdraft.text_files import read_json
from blockdraft.types import LoadOptions

COMPANIONS = (  # files of a checkpoint beside config.json and weights
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
QUANTIZED = "quantized"  # usual `doing` of `open_checkpoint`
READ = "read"  # `doing` of `open_checkpoint` that every checkpoint supports


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are read one at a time.

    Attributes:
        wanted: Configuration of its decoder.
        config: Configuration of its text part.
        raw: Content of config.json.
        tensors: Its tensors by name.
        files: Its other files, such as those of the tokenizer.
        source_fingerprint: Fingerprint of its weights; with an adapter, of those before the merge and the adapter's.
    """

    wanted: DecoderConfig
    config: AnyConfig
    raw: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Sequence[Path]
    source_fingerprint: str


def open_checkpoint(
    path: str | Path, revision: str | None = None, adapter: str | Path | None = None, doing: str = QUANTIZED
) -> AbstractContextManager[OpenCheckpoint]:
    """Open a checkpoint of a family that the native decoder supports, on the CPU, without reading all weights.

    Args:
        path: Model folder, hub name or GGUF file.
        revision, adapter: As in `load_target`.
        doing: What will be done to the checkpoint, as a past participle, for messages.

    Raises:
        UsageError: The native decoder does not know the model, the model is quantized already, or as in `load_target`.
            Of a GGUF file also: config.json cannot describe it, or its tokenizer is unknown.
    """
    path = located(path)
    return (_open_gguf if is_gguf(path) else _open_folder)(path, revision, adapter, doing)


@contextmanager
def _open_folder(
    path: str | Path, revision: str | None, adapter: str | Path | None, doing: str
) -> Iterator[OpenCheckpoint]:
    checked_folder(path, revision)
    with loading(path):
        config = load_config(path, revision)
        files = [find_file(path, name, revision) for name in ("config.json", *COMPANIONS)]
    if quantization := getattr(config, "quantization_config", None):
        raise UsageError(
            f"{path} is quantized already ({quantization.get('quant_method')}); give the model that it was made of."
        )
    config = text_part(config)
    merged = None if adapter is None else str(adapter)
    options = LoadOptions(dtype="float32", device="cpu", compile="off", revision=revision, adapter=merged)
    try:
        wanted = decoder_config(config)
        opened, source = open_weights(path, wanted, config, options)
    except NotCovered as refused:
        raise UsageError(f"{path} cannot be {doing}, because the native decoder cannot run it: {refused}.") from refused
    _check_parts(path, wanted, doing)
    raw = read_json(Path(str(files[0])))
    with loading(path):
        if source is None:
            source = weights_fingerprint((name, opened.tensors[name].tensor()) for name in wanted.tensor_shapes())
    yield OpenCheckpoint(
        wanted=wanted,
        config=config,
        raw=raw,
        tensors=opened.tensors,
        files=[Path(file) for file in files[1:] if file is not None],
        source_fingerprint=source,
    )


@contextmanager
def _open_gguf(
    path: str | Path, revision: str | None, adapter: str | Path | None, doing: str
) -> Iterator[OpenCheckpoint]:
    """Open the model of a GGUF file with the files that its folder would have."""
    refuse(path, adapter=adapter, revision=revision)
    file = open_gguf(path)
    with understanding(path):
        config = gguf_config(file)
        actual = fitted(decoder_config(config), file)
        _describe_fitted(config, actual, file)
        wanted = decoder_config(config)
        if others := differences(actual, replace(wanted, norm_plus_one=False)):
            raise NotCovered(f"transformers cannot express its {', '.join(others)}")
        weights = replace(decoder_weights(file, actual), expanded=frozenset())
        tokenizer, missing = find_tokenizer(file)
        ends = end_ids(file.metadata)
    _check_parts(path, wanted, doing)
    few = sorted(weights.kinds.keys() - FLOATS)
    if few and doing == QUANTIZED:
        raise UsageError(
            f"{path} is quantized already ({', '.join(few)}), and twice would lose more; give a file of the model in "
            "F16, BF16 or F32, or its folder."
        )
    if tokenizer is None:
        raise UsageError(f"{path} cannot be {doing} without its tokenizer, which is unknown: {missing}.")
    tensors = {}
    for name, tensor in weights.tensors.items():
        less = wanted.norm_plus_one and name.endswith("norm.weight")
        read = partial(_minus_one, weights, name) if less else partial(weights.read, name)
        tensors[name] = MadeTensor(tensor.shape, tensor.kind if tensor.kind in FLOATS else FEW_BITS, read)
    with tempfile.TemporaryDirectory() as folder:
        with loading(path):
            tokenizer.save_pretrained(folder)
            Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
        yield OpenCheckpoint(
            wanted=wanted,
            config=config,
            raw=config.to_dict(),
            tensors=tensors,
            files=sorted(Path(folder).iterdir()),
            source_fingerprint=weights.fingerprint(),
        )


def _check_parts(path: str | Path, wanted: DecoderConfig, doing: str) -> None:
    """Raise a UsageError for a decoder with parts that the new form cannot hold."""
    special = wanted.decode_only if doing == QUANTIZED else wanted.unusual
    if special and doing != READ:
        fewer = ", or make a GGUF file of fewer bits with llama-quantize" if doing == QUANTIZED else ""
        raise UsageError(f"{path} cannot be {doing}: it has {special}. Decode with it as it is{fewer}.")


def _minus_one(weights: GGUFWeights, name: str) -> Tensor:
    return dense(weights.read(name)).float() - 1


def _describe_fitted(config: AnyConfig, decoder: DecoderConfig, file: GGUFFile) -> None:
    """Add to a file's configuration what `fitted` reads from its tensors: biases and frequency factors."""
    if hasattr(config, "attention_bias"):
        config.attention_bias = decoder.qkv_bias
    if hasattr(config, "mlp_bias"):
        config.mlp_bias = decoder.mlp_bias
    if ROPE_FACTORS in file.tensors and not decoder.mixed:
        rope = long_rope(file.tensors[ROPE_FACTORS], config.max_position_embeddings, 1.0)
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **rope}


def differences(first: DecoderConfig, second: DecoderConfig) -> list[str]:
    """Return the names of settings that differ by more than the precision of float32."""
    names = [field.name for field in fields(first) if field.name != "layers"]
    names_that_differ = [name for name in names if not _equal(getattr(first, name), getattr(second, name))]
    alike = len(first.layers) == len(second.layers) and all(map(_alike, first.layers, second.layers))
    return names_that_differ if alike else [*names_that_differ, "windows or rotary embeddings"]


def _equal(first: Any, second: Any) -> bool:
    return first == second or (
        isinstance(first, float) and isinstance(second, float) and math.isclose(first, second, rel_tol=1e-6)
    )


def _alike(first: LayerKind, second: LayerKind) -> bool:
    pairs = zip(first.rope.inverse_frequencies, second.rope.inverse_frequencies, strict=True)
    same = all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)
    return first.window == second.window and math.isclose(first.rope.scale, second.rope.scale, rel_tol=1e-6) and same
