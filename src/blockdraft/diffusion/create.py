"""New block-diffusion models: from the weights of a causal language model, or with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.diffusion.folder import PAPER, PREFIX, other_files, write_model
from blockdraft.diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft.diffusion.settings import ConvertSettings, NewSettings
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.formats.model_folder import check_free
from blockdraft.models import located
from blockdraft.nn.denoiser import CausalDenoiser, Denoiser, why_not_denoiser
from blockdraft.nn.dit import DiT, DiTConfig
from blockdraft.targets import (
    BUNDLED,
    HEAD,
    TABLE,
    ModelConfig,
    OpenCheckpoint,
    TargetText,
    decoder_config,
    load_target_text,
    load_text_with,
    make_config,
    open_checkpoint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK_TOKEN = "<|mask|>"  # as in dllm
LEAST_NORM = 0.1  # of the mask token's embedding, relative to the mean of all
INITIAL_STD = 0.02  # of the first weights of a causal shape, as usual


@dataclass(frozen=True)
class Created:
    """A model that was written.

    Attributes:
        is_new: Whether the mask token was added to the tokenizer, which had none that could be used.
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
) -> Created:
    """Write a causal language model as a block-diffusion model. All weights stay. The model must be trained afterwards,
    unless blocks have one token and are predicted with a token shift: that is the causal model itself.

    Args:
        path: A Hugging Face model folder or hub name of the Llama or Qwen families; None is the bundled target.
        out: A new or empty folder, which appears whole or not at all.
        revision, adapter: As for `load_target`.

    Raises:
        UsageError: The model cannot be read or has parts that this network lacks, the mask token cannot be used, blocks
            are longer than the context, or `out` cannot be written.
    """
    path = BUNDLED if path is None else located(path)
    check_free(out)
    text = load_target_text(path, revision)
    if text.tokenizer is None:
        raise UsageError(f"{path} has no tokenizer, and a block-diffusion model needs one; copy it there.")
    if settings.block_size > text.max_context:
        raise UsageError(f"block_size is {settings.block_size}, and {path} has a context of {text.max_context} tokens.")
    with _only_writer(out, "converting"), open_checkpoint(path, revision, adapter, "converted") as source:
        if refused := why_not_denoiser(source.wanted):
            raise UsageError(f"{path} cannot be converted: {refused}.")
        mask, is_new = _mask_token(text, settings.mask_token_id, source.wanted.vocab_size)
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
    return Created(config, str(text.tokenizer.convert_ids_to_tokens(mask)), is_new)


def new_model(
    like: str | Path | None,
    out: Path,
    settings: NewSettings = NewSettings(),  # noqa: B008 (frozen)
) -> Created:
    """Write a new model with random weights, which predicts each token at its own position, without a token shift.

    Args:
        like: A folder with a tokenizer, or the hub name of a model, whose tokenizer is taken; None is the bundled
            target's.
        out: A new or empty folder, which appears whole or not at all.

    Raises:
        UsageError: There is no tokenizer, the mask token cannot be used, or `out` cannot be written.
    """
    like = BUNDLED if like is None else like
    check_free(out)
    described = ModelConfig(max_position_embeddings=settings.context)
    text = load_text_with(described, like)
    if text.tokenizer is None:
        raise UsageError(f"{like} has no tokenizer; name a folder with one, or a model on the hub.")
    size = 1 + max(text.tokenizer.get_vocab().values())
    mask, is_new = _mask_token(text, settings.mask_token_id, size)
    config = DiffusionConfig(settings.block_size, mask, token_shift=False)
    with _only_writer(out, "making"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network, raw = _random_network(settings, max(size, mask + 1))
        model = DiffusionModel(network, config, text, raw, other_files(Path(like)))
        write_model(model, network.state_dict(), out)
    return Created(config, str(text.tokenizer.convert_ids_to_tokens(mask)), is_new)


@contextmanager
def _only_writer(out: Path, doing: str) -> Iterator[None]:
    """Context in which no other process may write this new or empty folder."""
    with held(out, doing):
        check_free(out)  # again, now that no other process writes there
        yield


def _mask_token(text: TargetText, wanted: int | None, size: int) -> tuple[int, bool]:
    """The mask token's id, and whether it was added to the tokenizer just now.

    Args:
        wanted: Id that was asked for; None takes the tokenizer's own, or else adds one.
        size: Tokens that the model's table has rows for.

    Raises:
        UsageError: The wanted one lies outside the vocabulary, is for padding, or ends texts.
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
    """Another use of a token, which rules it out as mask token."""
    if token in text.eos_token_ids:
        return "which ends texts"
    return "which is the padding token" if token == tokenizer.pad_token_id else None


def _tensors(
    source: OpenCheckpoint, mask: int, is_new: bool, seed: int, progress: Callable[[str, int, int], None]
) -> dict[str, Tensor]:
    """All weights, with a row for the mask token in embedding and head. That row is sampled like the others if the
    token is new or its row is close to zero, as causal models leave rows of tokens that they never see: gradients would
    explode there."""
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


def _random_network(settings: NewSettings, vocab_size: int) -> tuple[Denoiser, dict[str, Any]]:
    """The network, and its part of config.json."""
    if settings.kind == "dit":
        config = DiTConfig(
            vocab_size=vocab_size,
            model_length=settings.context,
            hidden_dim=settings.hidden_size,
            n_blocks=settings.layers,
            n_heads=settings.heads,
            cond_dim=settings.condition_size,
        )
        raw = {"model_type": PAPER, "architectures": ["BD3LM"], "time_conditioning": False, **asdict(config)}
        return DiT(config), raw
    causal = make_config(
        {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": settings.hidden_size,
            "intermediate_size": 8 * settings.hidden_size // 3,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.heads,
            "head_dim": settings.hidden_size // settings.heads,
            "max_position_embeddings": settings.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
        }
    )
    network = CausalDenoiser(decoder_config(causal))
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
    named = {"model_type": f"{PREFIX}qwen3", "architectures": ["A2DQwen3LMHeadModel"]}
    return network, causal.to_dict() | named
