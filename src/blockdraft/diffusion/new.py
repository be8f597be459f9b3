"""A block-diffusion model from nothing: random weights and the tokenizer of another model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config

from blockdraft.diffusion.convert import Converted, mask_token
from blockdraft.diffusion.folder import PAPER, PREFIX, other_files, write_model
from blockdraft.diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft.diffusion.settings import NewSettings
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.formats.model_folder import check_free
from blockdraft.nn.denoiser import CausalDenoiser, Denoiser
from blockdraft.nn.dit import DiT, DiTConfig
from blockdraft.targets import BUNDLED, decoder_config, load_text_with

SPREAD = 0.02  # standard deviation of the first weights of a causal shape, as usual


def new_model(
    like: str | Path | None,
    out: Path,
    settings: NewSettings = NewSettings(),  # noqa: B008 (frozen)
) -> Converted:
    """Write a new model with random weights, which predicts each token in its place, without a token shift.

    Args:
        like: A folder with a tokenizer, or the hub name of a model, whose tokenizer it takes; None is the bundled
            target's.
        out: A new or empty folder, which appears whole or not at all.

    Raises:
        UsageError: There is no tokenizer, the mask token cannot be used, or `out` cannot be written.
    """
    like = BUNDLED if like is None else like
    check_free(out)
    described = PretrainedConfig()
    described.max_position_embeddings = settings.context
    text = load_text_with(described, like)
    if text.tokenizer is None:
        raise UsageError(f"{like} has no tokenizer; name a folder with one, or a model on the hub.")
    size = 1 + max(text.tokenizer.get_vocab().values())
    mask, is_new = mask_token(text, settings.mask_token_id, size)
    config = DiffusionConfig(settings.block_size, mask, token_shift=False)
    with held(out, "making"), torch.random.fork_rng(devices=[]):
        check_free(out)  # again, now that no other process writes there
        torch.manual_seed(settings.seed)
        network, raw = _made(settings, max(size, mask + 1))
        model = DiffusionModel(network, config, text, raw, other_files(Path(like)))
        write_model(model, network.state_dict(), out)
    return Converted(config, str(text.tokenizer.convert_ids_to_tokens(mask)), is_new)


def _made(settings: NewSettings, vocab_size: int) -> tuple[Denoiser, dict[str, object]]:
    """The network, and what config.json says of it."""
    if settings.kind == "dit":
        shape = settings.hidden_size, settings.layers, settings.heads, settings.condition_size
        config = DiTConfig(vocab_size, settings.context, *shape)
        raw = {"model_type": PAPER, "architectures": ["BD3LM"], "time_conditioning": False, **asdict(config)}
        return DiT(config), raw
    causal = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=8 * settings.hidden_size // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden_size // settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    network = CausalDenoiser(decoder_config(causal))
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=SPREAD)
    named = {"model_type": f"{PREFIX}qwen3", "architectures": ["A2DQwen3LMHeadModel"]}
    return network, causal.to_dict() | named
