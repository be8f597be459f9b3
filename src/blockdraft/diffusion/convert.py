"""From a causal language model to a block-diffusion model: the same weights, a mask token, and another mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockdraft.diffusion.folder import PREFIX, write_model
from blockdraft.diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft.diffusion.settings import ConvertSettings
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.formats.model_folder import check_free
from blockdraft.nn.denoiser import CausalDenoiser, why_not_denoiser
from blockdraft.targets import BUNDLED, HEAD, TABLE, OpenCheckpoint, TargetText, load_target_text, open_checkpoint

MASK_TOKEN = "<|mask|>"  # as in dllm
LEAST_NORM = 0.1  # of the mask token's embedding, over the mean of all


@dataclass(frozen=True)
class Converted:
    """Attributes:
    is_new: Whether the tokenizer had no mask token that could be used and got one.
    """

    config: DiffusionConfig
    mask_token: str
    is_new: bool


def convert(
    path: str | Path | None,
    out: Path,
    settings: ConvertSettings = ConvertSettings(),  # noqa: B008 (frozen)
    revision: str | None = None,
    adapter: str | Path | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Converted:
    """Write a causal language model as a block-diffusion model. All weights stay; training has to follow, unless blocks
    are of one token and predicted with a token shift: that is the causal model itself.

    Args:
        path: A Hugging Face model folder or hub name of the Llama or Qwen families; None is the bundled target.
        out: A new or empty folder, which appears whole or not at all.
        revision, adapter: As for `load_target`.

    Raises:
        UsageError: The model cannot be read or has parts that this network lacks, the mask token cannot be used, blocks
            are longer than the context, or `out` cannot be written.
    """
    path = BUNDLED if path is None else path
    check_free(out)
    text = load_target_text(path, revision)
    if text.tokenizer is None:
        raise UsageError(f"{path} has no tokenizer, and a block-diffusion model needs one; copy it there.")
    if settings.block_size > text.max_context:
        raise UsageError(f"block_size is {settings.block_size}, and {path} has a context of {text.max_context} tokens.")
    with held(out, "converting"), open_checkpoint(path, revision, adapter, "converted") as source:
        check_free(out)  # again, now that no other process writes there
        if refused := why_not_denoiser(source.wanted):
            raise UsageError(f"{path} cannot be converted: {refused}.")
        size = source.wanted.vocab_size
        mask, is_new = mask_token(text, settings.mask_token_id, size)
        tensors = _tensors(source, mask, is_new, settings.seed, progress)
        with torch.device("meta"):
            network = CausalDenoiser(replace(source.wanted, vocab_size=len(tensors[TABLE])))
        family = source.raw["model_type"]
        raw = {
            **{name: value for name, value in source.raw.items() if name not in ("auto_map", "torch_dtype")},
            "model_type": f"{PREFIX}{family}",
            "architectures": [f"A2D{family.capitalize()}LMHeadModel"],
            "vocab_size": len(tensors[TABLE]),
        }
        config = DiffusionConfig(settings.block_size, mask, settings.token_shift)
        files = {file.name: file.read_bytes() for file in source.files if file.name == "generation_config.json"}
        write_model(DiffusionModel(network, config, text, raw, files), tensors, out)
    return Converted(config, str(text.tokenizer.convert_ids_to_tokens(mask)), is_new)


def mask_token(text: TargetText, wanted: int | None, size: int) -> tuple[int, bool]:
    """The mask token's id, and whether it is new to the tokenizer, which then knows it now.

    Raises:
        UsageError: The one that is wanted lies outside the vocabulary, is for padding, or ends texts.
    """
    tokenizer = text.tokenizer
    assert tokenizer is not None
    if wanted is not None:
        if wanted >= size:
            raise UsageError(f"mask_token_id is {wanted}, and the model has {size} tokens, 0 to {size - 1}.")
        if use := _other_use(wanted, text, tokenizer):
            raise UsageError(
                f"mask_token_id is {wanted}, {use}; name a token that no text holds, or leave it out to get a new one."
            )
        return wanted, False
    own = tokenizer.mask_token_id
    if own is not None and own < size and _other_use(own, text, tokenizer) is None:
        return own, False
    names = tokenizer.get_vocab()
    name = next(name for name in (MASK_TOKEN, *(f"<|mask_{i}|>" for i in range(size))) if name not in names)
    tokenizer.add_special_tokens({"mask_token": name})
    return tokenizer.get_vocab()[name], True


def _other_use(token: int, text: TargetText, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What else a token is for."""
    if token in text.eos_token_ids:
        return "which ends texts"
    return "which is the padding token" if token == tokenizer.pad_token_id else None


def _tensors(
    source: OpenCheckpoint, mask: int, is_new: bool, seed: int, progress: Callable[[str, int, int], None]
) -> dict[str, Tensor]:
    """All weights. Embedding and head have a row for the mask token. It is drawn like the others where the token is new
    or its row is next to nothing, as causal models leave those that they never see: gradients would explode there."""
    found, names = dict[str, Tensor](), list(source.wanted.tensor_shapes())
    for done, name in enumerate(names):
        progress("weights", done, len(names))
        found[name] = source.tensors[name].tensor().clone()
    progress("weights", len(names), len(names))
    norms = found[TABLE].float().norm(dim=1)
    if not is_new and norms[mask] >= LEAST_NORM * norms.mean():
        return found
    generator = torch.Generator().manual_seed(seed)
    for name in (TABLE, HEAD):
        if (table := found.get(name)) is not None:
            deviation, mean = torch.std_mean(table.float(), dim=0)
            table = F.pad(table, (0, 0, 0, max(0, mask + 1 - len(table))))
            table[mask] = (mean + deviation * torch.randn(len(mean), generator=generator)).to(table.dtype)
            found[name] = table
    return found
