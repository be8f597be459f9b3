"""Dimensions of a model: from the catalogue, a `config.json` or a GGUF header."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.models import Model, PublishedDrafter, catalogue, known, model_of
from blockdraft.text_files import read_json

STATE_SIZE = 128  # default numbers per channel of a recurrent layer's state
STATE_WIDTH = 1.25  # default channels of a recurrent layer, relative to the hidden size
CONVOLUTION = 3  # tokens that a short convolution keeps, as in LFM2
MAX_DIMENSION = 2**40
HEADER_BYTES = 2**25  # fetched from a GGUF file on the hub; vocabularies of 250,000 tokens take about 12 MB
KEYS_OF_MOE = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
RECURRENT = {"linear_attention", "mamba", "recurrent", "conv"}


@dataclass(frozen=True)
class Shape:
    """A model's dimensions.

    Attributes:
        name: Name for commands.
        parameters: Weights of the text model; a tied head counts once.
        active: Weights used per token; equal to `parameters` without routed experts.
        hidden, intermediate, layers, heads, head_size, vocabulary, context: As in the model's configuration.
        tied: Whether embedding and head share a matrix.
        experts, experts_per_token: Routed experts per layer, and those that a token uses; 0 for dense models.
        full_layers, full_numbers: Layers with full attention, and the cached numbers per token in each.
        window_layers, window_numbers, window: Layers with a sliding window, their cached numbers per token, and the
            window in tokens.
        recurrent_layers, state_numbers: Recurrent layers, and the numbers of the state in each.
        stored_bytes: Size of the weights if a file was given, else 0.
        licence: Licence of the weights; None if unknown.
        drafters: Published drafters.
        path: Folder or GGUF file of the weights, if given.
    """

    name: str
    parameters: int
    active: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_size: int
    vocabulary: int
    context: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    full_layers: int = 0
    full_numbers: int = 0
    window_layers: int = 0
    window_numbers: int = 0
    window: int = 0
    recurrent_layers: int = 0
    state_numbers: int = 0
    stored_bytes: int = 0
    licence: str | None = None
    drafters: tuple[PublishedDrafter, ...] = ()
    path: str | None = None


def shape_of_model(model: Model) -> Shape | None:
    """Return the shape of a model of the catalogue, or None if its dimensions are unknown."""
    if not (model.parameters and model.layers and model.hidden_size and model.vocabulary):
        return None
    heads = model.heads or max(model.hidden_size // 128, 1)
    head_size = model.head_size or model.hidden_size // heads
    kv_heads = model.kv_heads or (None if model.latent_size else heads)
    attention_layers = model.attention_layers if model.attention_layers is not None else model.layers
    windowed = model.sliding_layers or (
        attention_layers if model.sliding_window and model.sliding_layers is None else 0
    )
    numbers = model.latent_size or 2 * (kv_heads or 0) * head_size
    full_numbers = numbers
    if model.global_kv_heads or model.global_head_size:
        full_numbers = 2 * (model.global_kv_heads or kv_heads or 0) * (model.global_head_size or head_size)
    return Shape(
        name=model.id,
        parameters=model.parameters,
        active=model.active_parameters or model.parameters,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size or 3 * model.hidden_size,
        layers=model.layers,
        heads=heads,
        head_size=head_size,
        vocabulary=model.vocabulary,
        context=model.context or 0,
        tied=bool(model.tied_head),
        experts=(model.experts or 0) if model.active_parameters else 0,
        experts_per_token=(model.experts_per_token or 0) if model.active_parameters else 0,
        full_layers=attention_layers - windowed,
        full_numbers=full_numbers,
        window_layers=windowed,
        window_numbers=numbers,
        window=model.sliding_window or 0,
        recurrent_layers=model.recurrent_layers or 0,
        state_numbers=_state_numbers(model),
        licence=model.licence,
        drafters=model.drafters,
    )


def _state_numbers(model: Model) -> int:
    if not model.recurrent_layers or not model.hidden_size:
        return 0
    if model.family in ("lfm2", "lfm2_moe"):
        return CONVOLUTION * model.hidden_size
    return int(STATE_WIDTH * model.hidden_size) * STATE_SIZE


def shape_of_config(config: Mapping[str, Any], name: str) -> Shape:
    """Return the shape for a `config.json`. Computes the number of weights from the dimensions.

    Raises:
        UsageError: A dimension is missing, or is not a positive integer.
    """
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = text.get(key)
            if value is None:
                continue
            lowest = 1 if default is None else 0
            if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= MAX_DIMENSION:
                raise UsageError(
                    f"{name}: {key} must be an integer from {lowest} to {MAX_DIMENSION}, got {value!r:.30}."
                )
            return value
        if default is None:
            raise UsageError(f"{name} lacks {keys[0]}; give the config.json of a language model.")
        return default

    hidden, layers = number("hidden_size", "n_embd", "d_model"), number("num_hidden_layers", "n_layer")
    heads, vocabulary = number("num_attention_heads", "n_head"), number("vocab_size")
    kv_heads = number("num_key_value_heads", default=heads) or heads
    head_size = number("head_dim", default=0) or max(hidden // heads, 1)
    intermediate = number("intermediate_size", "n_inner", default=0) or 4 * hidden
    experts = number(*KEYS_OF_MOE, default=0)
    per_token = number("num_experts_per_tok", "num_experts_per_token", default=1) if experts else 0
    if per_token > max(experts, 1):
        raise UsageError(f"{name}: num_experts_per_tok is {per_token}, but there are {experts} experts.")
    width = number("moe_intermediate_size", default=0) or intermediate
    dense = min(number("first_k_dense_replace", "num_dense_layers", default=0), layers) if experts else layers
    shared = number("n_shared_experts", default=0) * width + number("shared_expert_intermediate_size", default=0)
    latent = number("kv_lora_rank", default=0)
    rotated = number("qk_rope_head_dim", default=64) if latent else 0
    kinds = text.get("layer_types")
    kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    recurrent = sum(kind in RECURRENT for kind in kinds)
    window = number("sliding_window", default=0) if text.get("use_sliding_window", True) else 0
    windowed = sum("sliding" in kind for kind in kinds) if kinds else (layers if window else 0)
    pattern = text.get("sliding_window_pattern")
    if not kinds and window and isinstance(pattern, int) and pattern > 1:
        windowed = layers - layers // pattern
    windowed = windowed if window else 0
    if latent:
        nope, values = number("qk_nope_head_dim", default=128), number("v_head_dim", default=128)
        lora = number("q_lora_rank", default=0)
        queries = (hidden + heads * (nope + rotated)) * lora if lora else hidden * heads * (nope + rotated)
        attention = queries + hidden * (latent + rotated) + latent * heads * (nope + values) + heads * values * hidden
    else:
        attention = 2 * hidden * head_size * (heads + kv_heads)
    state_width = number("linear_num_value_heads", default=0) * number("linear_value_head_dim", default=STATE_SIZE)
    state_width = state_width or int(STATE_WIDTH * hidden)
    keys = number("linear_num_key_heads", default=0) * number("linear_key_head_dim", default=STATE_SIZE)
    mixing, state_numbers = hidden * (2 * (keys or state_width) + 3 * state_width), state_width * STATE_SIZE
    if "conv" in kinds:
        mixing, state_numbers = 4 * hidden**2, number("conv_L_cache", default=CONVOLUTION) * hidden
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    outside = vocabulary * hidden * (1 if tied else 2)
    outside += (layers - recurrent) * attention + recurrent * mixing + dense * 3 * hidden * intermediate
    routed = 3 * hidden * width * (layers - dense)
    outside += (layers - dense) * hidden * (experts + 3 * shared)
    return Shape(
        name=name,
        parameters=outside + experts * routed,
        active=outside + per_token * routed,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        head_size=head_size,
        vocabulary=vocabulary,
        context=number("max_position_embeddings", "n_positions", default=0),
        tied=tied,
        experts=experts,
        experts_per_token=per_token,
        full_layers=layers - recurrent - windowed,
        full_numbers=latent + rotated if latent else 2 * kv_heads * head_size,
        window_layers=windowed,
        window_numbers=latent + rotated if latent else 2 * kv_heads * head_size,
        window=window if windowed else 0,
        recurrent_layers=recurrent,
        state_numbers=state_numbers if recurrent else 0,
    )


def read_shape(name: str) -> Shape:
    """Return the shape of a model.

    Args:
        name: Name in the catalogue, folder, `config.json`, GGUF file, name of a model on the hub, or GGUF file on the
            hub, such as "owner/name/file.gguf", of which only the header is fetched.

    Raises:
        UsageError: The model is unknown, or its files cannot be read.
    """
    path = folder = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _shape_of_gguf(path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UsageError(f"{name} has no config.json; give a model's folder, its config.json or a GGUF file.")
    if path.is_file():
        return replace(shape_of_config(_read_json(path), name), path=str(folder) if folder.is_dir() else None)
    if re.fullmatch(r"[\w.-]+/[\w.-]+/.+\.gguf", name, re.IGNORECASE):
        return _shape_of_hub_gguf(name)
    if path.suffix in (".json", ".gguf"):
        raise UsageError(f"{name} does not exist; give a model's folder, its config.json or a GGUF file.")
    try:
        model = known(name)
    except UsageError:
        if "/" not in name:
            raise
        return shape_of_config(_read_json(_config_from_hub(name)), name)
    shape = shape_of_model(model)
    if shape is None:
        raise UsageError(f"The catalogue lacks the dimensions of {model.id}; give its config.json instead.")
    return shape


def known_shapes() -> tuple[Shape, ...]:
    """Return the shapes of all models of the catalogue with known dimensions."""
    return tuple(shape for model in catalogue() if (shape := shape_of_model(model)))


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        config = read_json(file)
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{file} cannot be read as JSON ({error}); copy or fetch it again.") from error
    if not isinstance(config, Mapping):
        raise UsageError(f"{file} is not a JSON object; give the config.json of a language model.")
    return config


def _config_from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"{name} is not in the catalogue, and the hub cannot be reached; give its config.json, or a name that "
            "`blockdraft models` lists."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name} is neither in the catalogue nor on the hub ({reason}).") from error


def _shape_of_gguf(file: Path) -> Shape:
    from blockdraft.targets import describe_target

    target = describe_target(file)
    shape = shape_of_config(target.config.to_dict(), str(file))
    count = sum(target.weights.kinds.values())
    active = max(count - (shape.parameters - shape.active), 1)
    model = model_of(file)
    return replace(
        shape,
        parameters=count,
        active=active,
        stored_bytes=target.weights.bytes,
        path=str(file),
        drafters=model.drafters if model else (),
    )


def _shape_of_hub_gguf(name: str) -> Shape:
    from huggingface_hub import HfFileSystem

    try:
        with HfFileSystem().open(name, "rb", block_size=HEADER_BYTES) as remote:
            header, size = remote.read(HEADER_BYTES), int(remote.size)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name} cannot be read from the hub ({str(error) or type(error).__name__}); give a local file, or a "
            "name that `blockdraft models` lists."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        # A sparse file: only the header is read, not the weights.
        file = Path(folder) / Path(name).name
        file.write_bytes(header)
        os.truncate(file, size)
        return replace(_shape_of_gguf(file), name=name, path=None)


def kv_cache_bytes(shape: Shape, tokens: int) -> int:
    """Return the bytes of the keys and values of one sequence in bf16, without recurrent states."""
    full = shape.full_layers * shape.full_numbers * tokens
    return 2 * (full + shape.window_layers * shape.window_numbers * min(tokens, shape.window))
