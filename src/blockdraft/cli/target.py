"""Options that commands share: target, drafter, sampling, drafting and datasets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from blockdraft.cli.display import tell
from blockdraft.cli.options import DATA, DRAFTING, MODEL, OUTPUT, SAMPLING, Only
from blockdraft.errors import UsageError
from blockdraft.plugins import DRAFTERS, entry_points, install_hint
from blockdraft.settings import Flag, field_info, settings
from blockdraft.text_files import read_text
from blockdraft.timing import telling
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_LOAD_OPTIONS, Drafting, LoadOptions, SamplingParams

if TYPE_CHECKING:
    from blockdraft.drafters import Drafter
    from blockdraft.targets import Target, TargetText

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of text.", rich_help_panel=OUTPUT, show_default=False)
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the results in the folder.", rich_help_panel=OUTPUT, show_default=False),
]
Folder = Annotated[Path, Flag(metavar="DIR")]
Files = Annotated[tuple[Path, ...], Flag(metavar="FILE", repeat=True, panel=DATA)]

DraftVocab = Annotated[str | None, Flag(metavar="N|FILE", panel=DRAFTING)]
DRAFT_VOCAB = (
    "Restrict drafting to some tokens, which makes it cheaper for drafters that use the target's output head: the "
    "first N of the vocabulary, or a file with a list of token ids (JSON or .pt)."
)

SAMPLING_FLAGS = (
    "max_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty stop seed"
)
SAMPLED_ONLY = ("top_k", "top_p", "min_p")  # flags without effect at temperature 0
Sampling = Annotated[SamplingParams, Only(SAMPLING_FLAGS, SAMPLING)]
DraftingOptions = Annotated[Drafting, Only("block_size tree_budget draft_window draft_passes sampled", DRAFTING)]

TARGET = (
    "Model whose output counts: a Hugging Face folder or hub name, a GGUF file, or a pulled model of `blockdraft "
    "models`. By default "
)


TRAINING = "target adapter revision dtype device backend"  # options of a target to train for


@settings
class TargetSettings(LoadOptions):
    """A target to train for. Its default does not depend on what has been pulled, as data and drafters go with it."""

    target: Annotated[str | None, Flag(metavar="DIR|NAME")] = Field(
        None, description=f"{TARGET}the bundled tiny model."
    )

    def load(self, device: Any = None, **changes: Any) -> Target:
        """Load the target.

        Args:
            device: Device in place of that of these settings, unless None.
            changes: As for `load_target`.
        """
        return load(self.target or "bundled", self.load_options(), device=device or self.device, **changes)


@settings
class DecodingSettings(TargetSettings):
    """A target to answer with."""

    target: Annotated[str | None, Flag(metavar="DIR|NAME")] = Field(
        None, description=f"{TARGET}SmolLM2 if it has been pulled, else the bundled tiny model."
    )
    threads: int | Literal["auto"] | None = Field("auto", description=field_info(LoadOptions, "threads").description)
    chat_template: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        None, description="Chat template to use instead of the target's."
    )

    def load_for(self, drafter: str | None = None, draft_vocab: str | None = None) -> Target:
        """Load the target, after a check that a drafter exists and a draft vocabulary is readable."""
        from blockdraft.drafters import check_draft_vocab, check_place
        from blockdraft.models import TINY, default_target

        template = None if self.chat_template is None else read_template(self.chat_template)
        if draft_vocab is not None:
            check_draft_vocab(draft_vocab)
        if drafter is not None:
            check_place(drafter)
        if self.target is None and default_target().is_relative_to(TINY) and sys.stderr.isatty():
            tell("This is the bundled tiny model; `blockdraft pull smollm2` gets a real one (93 MB).")
        processors = os.cpu_count()
        if isinstance(self.threads, int) and processors and self.threads > processors:
            tell(f"--threads is {self.threads}, more than this machine's {processors} processors; it may be very slow.")
        target = load(self.target, self.load_options())
        set_template(target, template)
        return target


def threads_in_words() -> str:
    """Return how many threads run on this machine's CPU, and why."""
    from blockdraft.kernels.cpu.threads import thread_choice

    return str(thread_choice())


def read_template(path: Path) -> str:
    """Return the text of a file that holds a chat template.

    Raises:
        UsageError: The file cannot be read, or is no template.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"{path} cannot be read ({reason}); --chat-template takes a file with a template.") from error
    if not text.strip():
        raise UsageError(f"--chat-template must be a file with a template, and {path} is empty.")
    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"--chat-template must be a Jinja template, and {path} is none: line {error.lineno}: {error.message}"
        ) from error
    return text


def set_template(target: Target | TargetText, template: str | None) -> None:
    """Replace the chat template of a target, unless it is None."""
    if template is not None and target.tokenizer is not None:
        target.tokenizer.chat_template = template


TrainingTarget = Annotated[TargetSettings, Only(TRAINING, MODEL)]
DecodingTarget = Annotated[DecodingSettings, Only(panel=MODEL)]


def _plugin_drafters() -> str:
    """Return the names of drafters that plugins of other projects bring, for a help text."""
    names = (name for name in entry_points(DRAFTERS) if install_hint(DRAFTERS, name) is None)
    return "".join(f", {name} (a plugin)" for name in names)


@settings
class DrafterSettings:
    """The drafter to answer with."""

    drafter: Annotated[str | None, Flag(metavar="DIR|NAME", panel=DRAFTING)] = Field(
        None,
        description="Drafter: the folder, GGUF file or hub name of one, or the folder of a smaller language model or "
        "block-diffusion model with the target's tokens. Or a name: mtp (the head in the target), "
        "lookup (copies what followed earlier), none (plain decoding), bundled (the default for targets that have "
        f"one; others get lookup){_plugin_drafters()}. A + combines several, as in lookup+DIR.",
    )
    draft_vocab: DraftVocab = Field(None, description=DRAFT_VOCAB)

    def load(self, target: Target) -> Drafter:
        """Load the named drafter, else the target's default drafter, with a note on what it is."""
        from blockdraft.drafters import held_drafters, load_drafter
        from blockdraft.models import model_of

        drafter = load_drafter(self.drafter, target=target, draft_vocab=self.draft_vocab)
        if self.drafter is not None:
            return drafter
        model = None if target.path is None else model_of(target.path)
        if drafter.kind == "lookup":
            remedy = f"To make one: blockdraft fit --target {target.path} --out DIR"
            tell(f"No drafter is bundled for {target.path}. Using lookup, which copies from the text so far. {remedy}.")
        elif held := [part.kind for part in drafter.parts if part.kind in held_drafters(target)]:
            tell(f"Drafting with lookup and {', '.join(held)} of {target.path}; --drafter none decodes without them.")
        elif model is not None:
            lookup = "lookup and " if len(drafter.parts) > 1 else ""
            tell(f"Drafting with {lookup}the drafter bundled for {model.id}; --drafter none decodes without it.")
        return drafter


def load(path: str | None, options: LoadOptions = DEFAULT_LOAD_OPTIONS, **changes: Any) -> Target:
    """Call `load_target` without the messages of transformers.

    Standard error says if it takes long, and why another backend than the native decoder runs the target.
    """
    from blockdraft.targets import load_target

    quiet()
    with telling(tell, "Loading the target", at_once=False):
        target = load_target(path, options, **changes)
    if target.backend_reason is not None:
        name = {"hf": "transformers", "native": "our own decoder"}.get(target.backend, target.backend)
        tell(f"The target runs on {name} (backend {target.backend}): {target.backend_reason}.")
    elif target.chosen_for is not None and options.backend == DEFAULT_BACKEND:
        tell(f"The target runs on {target.backend}, since {target.chosen_for}; --backend native is our own decoder.")
    return target


def quiet() -> None:
    """Silence the messages and progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def tell_unused(params: SamplingParams, temperatures: Sequence[float], sampled: bool | Iterable[str] = False) -> None:
    """Say on standard error which options have no effect because every temperature is 0.

    Args:
        sampled: Whether `--sampled` is given, or the names of methods that sample.
    """
    if any(temperatures):
        return
    default = SamplingParams()
    names = [name for name in SAMPLED_ONLY if getattr(params, name) != getattr(default, name)]
    unused = [f"--{name.replace('_', '-')}" for name in names]
    unused += (["--sampled"] if sampled else []) if isinstance(sampled, bool) else sampled
    if unused:
        verb = "changes" if len(unused) == 1 else "change"
        tell(f"{' and '.join(unused)} {verb} nothing at temperature 0, which decodes greedily; add --temperature T.")


def exclude(option: str, *others: tuple[str, object]) -> None:
    """Raise a UsageError if another option is given too. None, false and empty values are not given."""
    for name, value in others:
        if value not in (None, False, ()):
            raise UsageError(f"{option} and {name} exclude each other; leave one of them out.")
