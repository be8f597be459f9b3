"""Dimensions of a model, as far as a projection needs them: from the catalogue, a `config.json` or a GGUF header."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.models import Drafter, Model, catalogue, known, model_of

STATE_SIZE = 128  # numbers that a channel of a recurrent layer keeps, where the configuration does not say
STATE_WIDTH = 1.25  # channels of a recurrent layer over the hidden size, likewise
HEADER_BYTES = 2**25  # of a GGUF file on the hub; vocabularies of 250,000 tokens take about 12 MB
KEYS_OF_MOE = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
RECURRENT = {"linear_attention", "mamba", "recurrent", "conv"}


@dataclass(frozen=True)
class Shape:
    """A model's dimensions.

    Attributes:
        name: Name that commands take.
        parameters: Weights of the text model, a tied head once.
        active: Weights that one token meets; `parameters` without routed experts.
        hidden, intermediate, layers, heads, head_size, vocabulary, context: As in the model's configuration.
        tied: Whether embedding and head are one matrix.
        experts, experts_per_token: Routed experts of a layer, and those that a token meets; 0 without.
        full_layers, full_numbers: Layers that keep all tokens, and the numbers that each keeps for a token.
        window_layers, window_numbers, window: The same of layers that keep the last `window` tokens only.
        recurrent_layers, state_numbers: Layers with a state of fixed size, and its numbers in each of them.
        stored_bytes: Bytes of its weights, where they lie in a file that was given; else 0.
        licence: Licence of its weights; None if unknown.
        drafters: Published drafters.
        place: Folder or GGUF file of its weights, if it was given.
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
    drafters: tuple[Drafter, ...] = ()
    place: str | None = None


def of_model(model: Model) -> Shape | None:
    """Shape of a model of the catalogue; None where too little of it is known."""
    if not (model.parameters and model.layers and model.hidden_size and model.vocabulary):
        return None
    heads = model.heads or max(model.hidden_size // 128, 1)
    head_size = model.head_size or model.hidden_size // heads
    kv_heads = model.kv_heads or (None if model.latent_size else heads)
    attending = model.attention_layers if model.attention_layers is not None else model.layers
    windowed = model.sliding_layers or (attending if model.sliding_window and model.sliding_layers is None else 0)
    window = model.sliding_window or 0
    numbers = model.latent_size or 2 * (kv_heads or 0) * head_size
    everywhere = numbers
    if model.global_kv_heads or model.global_head_size:
        everywhere = 2 * (model.global_kv_heads or kv_heads or 0) * (model.global_head_size or head_size)
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
        full_layers=attending - windowed,
        full_numbers=everywhere,
        window_layers=windowed,
        window_numbers=numbers,
        window=window,
        recurrent_layers=model.recurrent_layers or 0,
        state_numbers=int(STATE_WIDTH * model.hidden_size) * STATE_SIZE if model.recurrent_layers else 0,
        licence=model.licence,
        drafters=model.drafters,
    )


def of_config(config: Mapping[str, Any], name: str) -> Shape:
    """Shape of a model by its `config.json`. Weights are counted from the dimensions.

    Raises:
        UsageError: A dimension is missing, or is no positive number.
    """
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = text.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default is None):
                raise UsageError(f"{name}: {key} is {value!r}; it has to be a positive whole number.")
            return value
        if default is None:
            raise UsageError(f"{name} says no {keys[0]}; give the config.json of a language model.")
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
    dense = min(number("first_k_dense_replace", default=0), layers) if experts else layers
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
    mixing = hidden * (2 * (keys or state_width) + 3 * state_width)
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
        state_numbers=state_width * STATE_SIZE if recurrent else 0,
    )


def read_shape(given: str) -> Shape:
    """Shape of a model by its name in the catalogue, folder, `config.json`, GGUF file, or name on the hub: of a model,
    or of a GGUF file, of which the header alone is fetched, as in "owner/name/file.gguf".

    Raises:
        UsageError: Nobody knows it, or what is there cannot be read.
    """
    place = folder = Path(given).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return _of_gguf(place)
    if place.is_dir():
        place = place / "config.json"
        if not place.is_file():
            raise UsageError(f"{given} has no config.json; give a model's folder, its config.json or a GGUF file.")
    if place.is_file():
        return replace(of_config(_json(place), given), place=str(folder) if folder.is_dir() else None)
    if re.fullmatch(r"[\w.-]+/[\w.-]+/.+\.gguf", given):
        return _gguf_on_hub(given)
    if place.suffix in (".json", ".gguf"):
        raise UsageError(f"{given} does not exist; give a model's folder, its config.json or a GGUF file.")
    try:
        model = known(given)
    except UsageError:
        if "/" not in given:
            raise
        return of_config(_json(_from_hub(given)), given)
    shape = of_model(model)
    if shape is None:
        raise UsageError(f"Dimensions of {model.id} are not in the catalogue; give its config.json in the place of it.")
    return shape


def known_shapes() -> tuple[Shape, ...]:
    """Shapes of all models of the catalogue whose dimensions are known."""
    return tuple(shape for model in catalogue() if (shape := of_model(model)))


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{file} cannot be read as JSON ({error}); copy or fetch it again.") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{file} holds no JSON object; give the config.json of a language model.")
    return found


def _from_hub(name: str) -> Path:
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


def _of_gguf(file: Path) -> Shape:
    from blockdraft.targets import describe_target

    found = describe_target(file)
    shape = of_config(found.config.to_dict(), str(file))
    count = sum(found.kinds.values())
    active = max(count - (shape.parameters - shape.active), 1)
    model = model_of(file)
    return replace(
        shape,
        parameters=count,
        active=active,
        stored_bytes=found.bytes,
        place=str(file),
        drafters=model.drafters if model else (),
    )


def _gguf_on_hub(given: str) -> Shape:
    from huggingface_hub import HfFileSystem

    try:
        with HfFileSystem().open(given, "rb", block_size=HEADER_BYTES) as remote:
            header, size = remote.read(HEADER_BYTES), int(remote.size)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{given} cannot be read from the hub ({str(error) or type(error).__name__}); give a file of this machine, "
            "or a name that `blockdraft models` lists."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        # A file with a hole in the place of the weights, of which nothing is read.
        file = Path(folder) / Path(given).name
        file.write_bytes(header)
        os.truncate(file, size)
        return replace(_of_gguf(file), name=given, place=None)


def cache_of(shape: Shape, tokens: int) -> int:
    """Bytes of the keys and values of a text in bf16, without recurrent states."""
    full = shape.full_layers * shape.full_numbers * tokens
    return 2 * (full + shape.window_layers * shape.window_numbers * min(tokens, shape.window))
