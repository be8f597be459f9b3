"""A text as characters, and small random models of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.diffusion.settings import TextSettings
from blockdraft.diffusion.convert import convert
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.settings import ConvertSettings
from blockdraft.diffusion.text import Tokens
from blockdraft.errors import UsageError

MASK = "<|mask|>"


class Corpus:
    """A text, whose end is held out.

    Attributes:
        trained, held_out: All tokens of both are to be predicted.
    """

    def __init__(self, path: Path, held_out: float) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read ({error}); --text takes a file of UTF-8 text.") from error
        self.tokenizer = _tokenizer(text)
        ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(text)), dtype=torch.int64)
        cut = round(len(ids) * (1 - held_out))
        self.trained, self.held_out = (Tokens(part, part >= 0) for part in (ids[:cut], ids[cut:]))

    def random_model(self, settings: TextSettings, seed: int, block_size: int, token_shift: bool) -> DiffusionModel:
        """A model that has learned nothing. With one seed its weights are the same, whatever its blocks."""
        config = Qwen3Config(
            vocab_size=len(self.tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=3 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=settings.length,
            bos_token_id=None,
            eos_token_id=None,
        )
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            torch.manual_seed(seed)
            causal, made = Path(folder) / "causal", Path(folder) / "made"
            Qwen3ForCausalLM(config).save_pretrained(causal)
            (causal / "generation_config.json").unlink()  # would be copied along whenever the model is written
            self.tokenizer.save_pretrained(causal)
            convert(causal, made, ConvertSettings(block_size, token_shift))
            return load_model(made, "cpu", "float32")


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token a character."""
    tokens = [*sorted(set(text)), MASK]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token=MASK, clean_up_tokenization_spaces=False)
