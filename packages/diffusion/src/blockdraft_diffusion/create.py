"""Creation of block-diffusion models: from a causal language model, or with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.models import located
from blockdraft.targets import (
    BUNDLED,
    HEAD,
    TABLE,
    ModelConfig,
    TargetText,
    load_target_text,
    load_text_with,
)
from blockdraft_diffusion.denoiser import CausalDenoiser, why_not_denoiser
from blockdraft_diffusion.dit import DiT, DiTConfig
from blockdraft_diffusion.folder import PAPER, PREFIX, other_files, write_model
from blockdraft_diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft_diffusion.settings import ConvertSettings, NewSettings
from blockdraft_tools.checkpoint import OpenCheckpoint, open_checkpoint
from blockdraft_tools.model_folder import check_free

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK_TOKEN = "<|mask|>"  # as in dllm
CONDITION_SIZE = 64  # width of the time embedding that conditions the norms
MIN_NORM = 0.1  # of the mask token's embedding, relative to the mean over all tokens


@dataclass(frozen=True)
class Created:
    """Description of a model that was written.

    Attributes:
        is_new: Whether the mask token was added to the tokenizer, which had no usable one.
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
    """Convert a causal language model into a block-diffusion model with the same weights.

    The model must be trained afterwards. The exception is a block size of 1 with a token shift, which is the causal
    model itself.

    Args:
        path: A Hugging Face model folder or hub name of the Llama or Qwen families; None uses the bundled target.
        out: A new or empty folder, written atomically.
        revision, adapter: As for `load_target`.

    Raises:
        UsageError: The model cannot be read or is not supported, the mask token is not usable, blocks are longer than
            the context, or `out` cannot be written.
    """
    path = BUNDLED if path is None else located(path)
    check_free(out)
    text = load_target_text(path, revision)
    if text.tokenizer is None:
        raise UsageError(f"{path} has no tokenizer, which a block-diffusion model needs; copy it there.")
    if settings.block_size > text.max_context:
        raise UsageError(
            f"block_size must be at most {text.max_context}, the context of {path}, got {settings.block_size}."
        )
    with _only_writer(out, "converting"), open_checkpoint(path, revision, adapter, "converted") as source:
        if reason := why_not_denoiser(source.wanted):
            raise UsageError(f"{path} cannot be converted: {reason}.")
        mask, is_new = _mask_token(text, settings.mask_token_id, source.wanted.vocab_size)
        tensors = _tensors(source, mask, is_new, progress)
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
    """Create a model with random weights and without a token shift.

    Args:
        like: A folder, or the hub name of a model, whose tokenizer is used; None uses the bundled target's.
        out: A new or empty folder, written atomically.

    Raises:
        UsageError: There is no tokenizer, the mask token is not usable, or `out` cannot be written.
    """
    like = BUNDLED if like is None else like
    check_free(out)
    text = load_text_with(ModelConfig(max_position_embeddings=settings.context), like)
    if text.tokenizer is None:
        raise UsageError(f"{like} has no tokenizer; give a folder with one, or a model on the hub.")
    size = 1 + max(text.tokenizer.get_vocab().values())
    mask, is_new = _mask_token(text, settings.mask_token_id, size)
    config = DiffusionConfig(settings.block_size, mask, token_shift=False)
    with _only_writer(out, "making"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        shape = DiTConfig(
            vocab_size=max(size, mask + 1),
            model_length=settings.context,
            hidden_dim=settings.hidden_size,
            n_blocks=settings.layers,
            n_heads=settings.heads,
            cond_dim=CONDITION_SIZE,
        )
        raw = {"model_type": PAPER, "architectures": ["BD3LM"], "time_conditioning": False, **asdict(shape)}
        network = DiT(shape)
        model = DiffusionModel(network, config, text, raw, other_files(Path(like)))
        write_model(model, network.state_dict(), out)
    return Created(config, str(text.tokenizer.convert_ids_to_tokens(mask)), is_new)


@contextmanager
def _only_writer(out: Path, doing: str) -> Iterator[None]:
    """Lock this new or empty folder against other processes."""
    with held(out, doing):
        check_free(out)  # again, now that the folder is locked
        yield


def _mask_token(text: TargetText, requested: int | None, vocab_size: int) -> tuple[int, bool]:
    """Return the mask token's id, and whether it was added to the tokenizer.

    Args:
        requested: Id to use; None uses the tokenizer's mask token, or else adds one.
        vocab_size: Number of tokens in the model's embedding.

    Raises:
        UsageError: `requested` is outside the vocabulary, or is the padding token or an end token.
    """
    tokenizer = text.tokenizer
    assert tokenizer is not None
    if requested is not None:
        if requested >= vocab_size:
            raise UsageError(f"mask_token_id must be between 0 and {vocab_size - 1}, got {requested}.")
        if use := _other_use(requested, text, tokenizer):
            raise UsageError(
                f"mask_token_id is {requested}, {use}; give a token that no text contains, or omit it to add one."
            )
        return requested, False
    own = tokenizer.mask_token_id
    if own is not None and own < vocab_size and _other_use(own, text, tokenizer) is None:
        return own, False
    names = tokenizer.get_vocab()
    name = next(name for name in (MASK_TOKEN, *(f"<|mask_{i}|>" for i in range(vocab_size))) if name not in names)
    tokenizer.add_special_tokens({"mask_token": name})
    return tokenizer.get_vocab()[name], True


def _other_use(token: int, text: TargetText, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a use of the token that rules it out as mask token, else None."""
    if token in text.eos_token_ids:
        return "an end token"
    return "the padding token" if token == tokenizer.pad_token_id else None


def _tensors(
    source: OpenCheckpoint, mask: int, is_new: bool, progress: Callable[[str, int, int], None]
) -> dict[str, Tensor]:
    """Return all weights, with a row for the mask token in the embedding and the output head.

    The row is sampled with the mean and deviation of the other rows if the token is new or the row is close to zero.
    Causal models leave rows of unused tokens close to zero, where gradients would explode.
    """
    tensors, names = dict[str, Tensor](), list(source.wanted.tensor_shapes())
    for done, name in enumerate(names):
        progress("weights", done, len(names))
        tensors[name] = source.tensors[name].tensor().clone()
    progress("weights", len(names), len(names))
    norms = tensors[TABLE].float().norm(dim=1)
    if not is_new and norms[mask] >= MIN_NORM * norms.mean():
        return tensors
    generator = torch.Generator().manual_seed(0)
    for name in (TABLE, HEAD):
        if (table := tensors.get(name)) is not None:
            deviation, mean = torch.std_mean(table.float(), dim=0)
            table = F.pad(table, (0, 0, 0, max(0, mask + 1 - len(table))))
            table[mask] = (mean + deviation * torch.randn(len(mean), generator=generator)).to(table.dtype)
            tensors[name] = table
    return tensors
