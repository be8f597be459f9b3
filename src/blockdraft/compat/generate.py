"""Drafting inside transformers: `model.generate(..., custom_generate=FOLDER, drafter=...)`.

The folder, which may be a repository on the hub, is written by `write_custom_generate` and calls `generate` below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from blockdraft.compat.adapt import check_token_ids, engine_for, stops_of, without_padding
from blockdraft.drafters import Drafter, joined, load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError, describe
from blockdraft.targets import Target, as_target
from blockdraft.types import JOINT, SamplingParams

GENERATE = '''"""Lossless decoding with a drafter: model.generate(..., custom_generate=THIS, trust_remote_code=True)."""

from blockdraft.compat.generate import generate as decode

DRAFTER = {drafter!r}  # folder or hub name, unless `drafter` of generate names another


def generate(model, drafter=DRAFTER, **arguments):
    return decode(model, drafter=drafter, **arguments)
'''
# Settings of a GenerationConfig that are followed, or that do not change the output. All others are refused.
HEEDED = {"max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
HEEDED |= {"eos_token_id", "pad_token_id", "bos_token_id", "num_return_sequences"}
HEEDED |= {"use_cache", "cache_implementation", "max_cache_len", "compile_config", "disable_compile", "early_stopping"}
HEEDED |= {"length_penalty", "transformers_version", "prefill_chunk_size", "low_memory", "_from_model_config"}
HEEDED |= {name for name in GenerationConfig().to_dict() if "assistant" in name or "lookbehind" in name}

LOADED = "_blockdraft"  # attribute of a model that holds its `Loaded`


class Loaded:
    """Target and drafters of a model, loaded at its first call. A copy of the model starts with an empty one."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.drafters: dict[str, Drafter] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded, ()


def write_custom_generate(folder: Path, drafter: str | None = None) -> None:
    """Write a folder for `custom_generate=folder`.

    Args:
        drafter: Folder or hub name of the drafter for calls that name none.
    """
    own = folder / "custom_generate"
    own.mkdir(parents=True, exist_ok=True)
    (own / "generate.py").write_text(GENERATE.format(drafter=drafter), encoding="utf-8")
    (own / "requirements.txt").write_text(f"blockdraft>={version('blockdraft')}\n", encoding="utf-8")


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

    Greedy decoding gives the same tokens as without a drafter, and sampling the same distribution.

    Args:
        inputs: `[B, L]` integers; `input_ids` is another name for it.
        drafter: Folder or hub name of a drafter, or the name of one without weights, such as "prompt_lookup".
        streamer: A streamer of transformers, for one prompt.
        seed: Row i samples with `seed + i`; None takes the seeds from torch's generator.
        given: Fields of a GenerationConfig, and `attention_mask`.

    Returns:
        `[B, L + longest]` int64: the prompts with their padding, then the answers, filled with the pad token.

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
    longest = _new_tokens(model, generation_config, config, ids.size(1), "max_length" in of_config)
    with _evaluating(model):
        target, chosen = _pair(model, drafter)
        params = [
            SamplingParams(
                max_new_tokens=longest,
                **_sampling(config),
                repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
                seed=None if seed is None else seed + row,
                stop_token_ids=stops_of(stops, target),
                ignore_eos=True,
            )
            for row in range(len(prompts))
        ]
        engine = engine_for(target, chosen, prompts, longest)
        if streamer is None:
            answers = [completion.checked().token_ids for completion in engine.generate(prompts, params)]
        elif len(prompts) == 1:
            answers = [[token for part in _streamed(engine, prompts[0], params[0], ids, streamer) for token in part]]
        else:
            raise UsageError(f"inputs holds {len(prompts)} prompts; a streamer takes one, so call generate for each.")
    width = max(map(len, answers))
    filler = pad if pad is not None else next(iter(stops), 0)
    filled = torch.tensor([answer + [filler] * (width - len(answer)) for answer in answers], device=ids.device)
    return torch.cat([ids.long(), filled], dim=1)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in evaluation mode, since dropout would give each forward another distribution."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check(config: GenerationConfig) -> None:
    """Refuse settings that are not supported and would change the output."""
    usual = GenerationConfig._get_default_generation_params()
    for name, value in config.to_dict().items():
        if name not in HEEDED and value is not None and value != usual.get(name, False):
            raise UsageError(f"{name} is {value!r}, which is not supported with a drafter; leave it out.")


def _sampling(config: GenerationConfig) -> dict[str, Any]:
    """Temperature, top-k, top-p and min-p for the engine."""
    if not config.do_sample:
        return {}
    if config.temperature == 0:
        raise UsageError("temperature is 0 with do_sample=True; use do_sample=False to decode greedily.")
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _new_tokens(
    model: PreTrainedModel, given: GenerationConfig | None, config: GenerationConfig, prompt: int, named: bool
) -> int:
    """Most tokens of an answer, by the rules of transformers."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    limit = int(config.max_length)
    if named or (given is not None and given.max_length is not None) or model.generation_config.max_length is not None:
        if limit <= prompt:
            raise UsageError(f"max_length is {limit} and the prompt has {prompt} tokens; give max_new_tokens.")
        return limit - prompt
    return limit  # the default of transformers counts new tokens only


def _pair(model: PreTrainedModel, drafter: str | Path) -> tuple[Target, Drafter]:
    kept = model.__dict__.setdefault(LOADED, Loaded())
    if kept.target is None or (kept.target.dtype, kept.target.device) != (model.dtype, model.device):
        kept.target, kept.drafters = as_target(model), {}
    if str(drafter) not in kept.drafters:
        kept.drafters[str(drafter)] = load_drafter(_folder(drafter), target=kept.target)
    return kept.target, kept.drafters[str(drafter)]


def _folder(drafter: str | Path) -> str | Path:
    """Folder of a drafter, or folders of a combination. A drafter on the hub is fetched."""
    if "/" not in str(drafter) or Path(drafter).exists():
        return drafter
    names = joined(drafter)
    if len(names) > 1:
        return JOINT.join(str(_folder(name)) for name in names)
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(str(drafter), allow_patterns=["*.json", "*.safetensors", "*.pt", "*.bin"]))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"drafter is {str(drafter)!r}, which is not a folder and cannot be fetched from the hub "
            f"({describe(error)}); give the folder of a drafter."
        ) from error


def _streamed(
    engine: Engine, prompt: list[int], params: SamplingParams, ids: Tensor, streamer: Any
) -> Iterator[list[int]]:
    streamer.put(ids.cpu())
    for chunk in engine.stream(prompt, params):
        if chunk.checked().token_ids:
            streamer.put(torch.tensor(chunk.token_ids))
        yield list(chunk.token_ids)
    streamer.end()
