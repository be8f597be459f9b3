"""Bits per character by block size: models of equal size that have learned from equally many characters."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.diffusion.settings import TextSettings
from benchmarks.harness.records import Records
from blockdraft.diffusion.create import convert
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.settings import ConvertSettings, DiffusionRecipe, LikelihoodSettings
from blockdraft.diffusion.text import Tokens
from blockdraft.diffusion.train import train
from blockdraft.errors import UsageError
from blockdraft.training.progress import Progress, run_folder

AUTOREGRESSIVE = "autoregressive"
SAVES = 4  # checkpoints of a run
SCORED_AT_ONCE = 32  # rows
ALL = (0.001, 1.0)
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
        """An untrained model. Its weights depend on the seed, not on its blocks."""
        heads = {"num_attention_heads": settings.heads, "num_key_value_heads": settings.heads}
        sizes = {"hidden_size": settings.hidden, "intermediate_size": 3 * settings.hidden}
        config = Qwen3Config(
            **heads,
            **sizes,
            vocab_size=len(self.tokenizer),
            num_hidden_layers=settings.layers,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=settings.length,
            bos_token_id=None,
            eos_token_id=None,
        )
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            torch.manual_seed(seed)
            causal, made = Path(folder) / "causal", Path(folder) / "made"
            Qwen3ForCausalLM(config).save_pretrained(causal)
            (causal / "generation_config.json").unlink()  # would be copied whenever the model is written
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


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        block_size: None is one block for the whole row.
        clip: The noise that is learned lies between these two.
    """

    block_size: int | None
    clip: tuple[float, float]
    token_shift: bool = False


# Clipped as in arXiv 2503.09573. With blocks of one token that leaves a single level of noise, at which the loss is the
# likelihood itself; with a token shift besides, the model is the autoregressive one.
KINDS = {
    AUTOREGRESSIVE: Kind(1, (1.0, 1.0), token_shift=True),
    "block 1": Kind(1, ALL),
    "block 1 clipped": Kind(1, (1.0, 1.0)),
    "block 4": Kind(4, ALL),
    "block 4 clipped": Kind(4, (0.45, 0.95)),
    "block 16": Kind(16, ALL),
    "block 16 clipped": Kind(16, (0.3, 0.8)),
    "whole": Kind(None, ALL),
    "whole clipped": Kind(None, (0.001, 0.5)),
}


@dataclass(frozen=True)
class TextRun:
    """One model.

    Attributes:
        tokens: That it was trained on, the given ones among them.
        scored: Characters that were measured on.
        bits: Per character, a bound unless blocks are of one; low and high are the ends of the 95 % interval that the
            draws of the noise leave.
        loss_deviation: Of the loss from step to step, in the second half of the training.
    """

    KEY = ("model", "seed")

    model: str
    seed: int
    block_size: int
    low: float
    high: float
    parameters: int
    steps: int
    tokens: int
    scored: int
    bits: float
    bits_low: float
    bits_high: float
    loss_deviation: float


def text_runs(out: Path) -> Records[TextRun]:
    return Records(TextRun, out / "runs.csv")


def model_folder(out: Path, model: str, seed: int) -> Path:
    return out / "models" / f"{model.replace(' ', '-')}-{seed}"


def check_models(names: Sequence[str]) -> None:
    """Raise a UsageError for a name that no model has."""
    if unknown := [name for name in names if name not in KINDS]:
        raise UsageError(f"There is no model {unknown[0]!r}; there are {', '.join(KINDS)}.")


def compare(
    corpus: Corpus, settings: TextSettings, out: Path, progress: Callable[[str, int, int], None]
) -> Records[TextRun]:
    """Train and measure what is left, seed after seed, so that an interrupted comparison has all kinds equally often.

    Args:
        out: Gets runs.csv and models/.
        progress: Called with what is being done, steps that are done and steps that there are.
    """
    check_models(settings.models)
    runs = text_runs(out)
    units = [(name, seed) for seed in range(settings.seeds) for name in settings.models]
    left = [unit for unit in units if unit not in runs.had]
    total = len(left) * settings.steps
    for number, (name, seed) in enumerate(left):

        def told(stage: str, done: int, steps: int, number: int = number, name: str = name, seed: int = seed) -> None:
            begun = settings.steps - steps  # of an interrupted run
            text = f"{name}, seed {seed} ({len(units) - len(left) + number + 1} of {len(units)}), {stage}"
            progress(text, number * settings.steps + begun + done, total)

        runs.add(_run(corpus, settings, name, seed, model_folder(out, name, seed), told))
    return runs


def _run(
    corpus: Corpus, settings: TextSettings, name: str, seed: int, folder: Path, told: Callable[[str, int, int], None]
) -> TextRun:
    kind, length = KINDS[name], settings.length
    size = kind.block_size or length
    model = corpus.random_model(settings, seed, size, kind.token_shift)
    low, high = kind.clip
    recipe = DiffusionRecipe(
        length=length,
        batch=settings.batch,
        low=low,
        high=high,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        seed=seed,
        held_out=0.0,
        eval_every=0,
        save_every=math.ceil(settings.steps / SAVES),
        keep=1,
        dtype="float32",  # on every machine
    )
    lines = train(model, [corpus.trained], settings.steps, folder, recipe, Progress(told))
    scored = Tokens(*(part[: settings.scored or None] for part in corpus.held_out))
    how = LikelihoodSettings(length=length, draws=settings.draws, batch=SCORED_AT_ONCE)
    found = likelihood(model, [scored], how)
    losses = [line["loss"] for line in lines[len(lines) // 2 :]]
    shutil.rmtree(run_folder(folder) / "checkpoints")  # its weights are in `folder`
    return TextRun(
        name,
        seed,
        size,
        low,
        high,
        parameters=sum(weight.numel() for weight in model.network.parameters()),
        steps=settings.steps,
        tokens=settings.steps * settings.batch * length,
        scored=found.tokens,
        bits=found.bits_per_token,
        bits_low=math.log2(found.low),
        bits_high=math.log2(found.high),
        loss_deviation=pstdev(losses),
    )
