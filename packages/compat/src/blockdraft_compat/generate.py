"""Drafting inside transformers: `model.generate(..., custom_generate=FOLDER, drafter=...)`.

The folder, which may be a repository on the hub, is written by `write_custom_generate` and calls `generate` below.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.errors import UsageError
from blockdraft.targets import Target, as_target
from blockdraft.types import SamplingParams
from blockdraft_compat.adapt import check_token_ids, decode_batch, sampling, stop_ids, without_padding

GENERATE = '''"""Lossless decoding with a drafter: model.generate(..., custom_generate=THIS, trust_remote_code=True)."""

from blockdraft_compat.generate import generate as decode

DRAFTER = {drafter!r}  # folder or hub name, unless `drafter` of generate names another


def generate(model, drafter=DRAFTER, **arguments):
    return decode(model, drafter=drafter, **arguments)
'''
# Fields of a GenerationConfig that are followed or do not change the output. All others are refused.
NAMES = """max_length max_new_tokens do_sample temperature top_k top_p min_p repetition_penalty eos_token_id
pad_token_id bos_token_id num_return_sequences use_cache cache_implementation max_cache_len compile_config
disable_compile early_stopping length_penalty transformers_version prefill_chunk_size low_memory _from_model_config"""
SUPPORTED = {*NAMES.split()}
SUPPORTED |= {name for name in GenerationConfig().to_dict() if "assistant" in name or "lookbehind" in name}

SAMPLED = ("temperature", "top_k", "top_p", "min_p")
LOADED = "_blockdraft"  # attribute of a model that holds its `Loaded`


class Loaded:
    """Target and drafters of a model, loaded at the first call. A copy of the model starts without them."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.drafters: dict[str, Drafter] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded, ()


def write_custom_generate(folder: str | Path, drafter: str | None = None) -> None:
    """Write a folder for `custom_generate=folder`.

    Args:
        drafter: Folder or hub name of the drafter for calls without `drafter`.
    """
    own = Path(folder, "custom_generate")
    own.mkdir(parents=True, exist_ok=True)
    (own / "generate.py").write_text(GENERATE.format(drafter=drafter), encoding="utf-8")
    (own / "requirements.txt").write_text(f"blockdraft-compat>={version('blockdraft-compat')}\n", encoding="utf-8")


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: str | Path | None,
    streamer: Any = None,
    seed: int | None = None,
    synced_gpus: bool | None = None,
    **given: Any,
) -> Tensor:
    """Continue a batch of prompts as `model.generate` does.

    Greedy decoding returns the same tokens as without a drafter, and sampling has the same distribution.

    Args:
        inputs: `[B, L]` integers; `input_ids` is another name for it.
        drafter: Folder or hub name of a drafter, or the name of one without weights, such as "lookup".
        streamer: A streamer of transformers, for one prompt.
        seed: Row i samples with `seed + i`; None takes the seeds from torch's generator.
        given: Fields of a GenerationConfig, and `attention_mask`.

    Returns:
        `[B, L + longest]` int64: the prompts with their padding, then the padded responses.

    Raises:
        UsageError: An argument or a setting is not supported, or the drafter does not fit.
    """
    if drafter is None:
        raise UsageError("drafter is not given; give its folder or hub name, as in generate(..., drafter=DIR).")
    given = {name: value for name, value in given.items() if value is not None}
    of_config = {name: given.pop(name) for name in set(given) & set(GenerationConfig().to_dict())}
    if inputs is not None and "input_ids" in given:
        raise UsageError("inputs and input_ids are both given and mean the same; leave one out.")
    ids, mask = given.pop("input_ids", inputs), given.pop("attention_mask", None)
    given = {name: value for name, value in given.items() if not (hasattr(value, "__len__") and len(value) == 0)}
    of_model: Any = model  # `_prepare_generation_config` is missing from the type of PreTrainedModel
    config, _ = of_model._prepare_generation_config(generation_config, **of_config)
    _check(config)
    if given or synced_gpus:
        raise UsageError(f"{', '.join(given) or 'synced_gpus'} is not supported with a drafter; leave it out.")
    if ids is None:
        raise UsageError("inputs is not given; give inputs or input_ids, [batch, length].")
    check_token_ids(ids)
    stops = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or ())
    pad = config.pad_token_id
    if mask is None and pad is not None and pad not in stops:
        mask = ids.ne(pad)  # as in transformers
    count = config.num_return_sequences or 1
    ids = ids.repeat_interleave(count, dim=0)
    prompts = without_padding(ids, None if mask is None else mask.repeat_interleave(count, dim=0))
    is_total = "max_length" in of_config or (generation_config is not None and generation_config.max_length is not None)
    longest = _new_tokens(model, config, ids.size(1), is_total)
    training = model.training
    model.eval()  # dropout would give each forward pass another distribution
    try:
        target, loaded = _pair(model, drafter)
        params = SamplingParams(
            max_new_tokens=longest,
            **sampling(config.do_sample, **{name: getattr(config, name) for name in SAMPLED}),
            repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
            seed=seed,
            stop_token_ids=stop_ids(stops, target),
            ignore_eos=True,
        )
        filler = pad if pad is not None else next(iter(stops), 0)
        return decode_batch(target, loaded, ids, prompts, params, filler, streamer=streamer)[0]
    finally:
        model.train(training)


def _check(config: GenerationConfig) -> None:
    usual = GenerationConfig._get_default_generation_params()
    for name, value in config.to_dict().items():
        if name not in SUPPORTED and value is not None and value != usual.get(name, False):
            raise UsageError(f"{name} is {value!r}, which is not supported with a drafter; leave it out.")


def _new_tokens(model: PreTrainedModel, config: GenerationConfig, prompt: int, is_total: bool) -> int:
    """Return the maximum number of new tokens. `max_length` includes the prompt if a caller or the model gives it."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    limit = int(config.max_length)
    if not is_total and model.generation_config.max_length is None:
        return limit
    if limit <= prompt:
        raise UsageError(f"max_length is {limit} and the prompt has {prompt} tokens; give max_new_tokens.")
    return limit - prompt


def _pair(model: PreTrainedModel, drafter: str | Path) -> tuple[Target, Drafter]:
    loaded = model.__dict__.setdefault(LOADED, Loaded())
    if loaded.target is None or (loaded.target.dtype, loaded.target.device) != (model.dtype, model.device):
        loaded.target, loaded.drafters = as_target(model), {}
    if str(drafter) not in loaded.drafters:
        loaded.drafters[str(drafter)] = load_drafter(drafter, target=loaded.target)
    return loaded.target, loaded.drafters[str(drafter)]
