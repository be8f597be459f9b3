"""Options that several commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from blockdraft.cli import loading
from blockdraft.data.settings import RecordSettings
from blockdraft.errors import UsageError
from blockdraft.settings import explain_option
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_COMPILE, Backend, Compile, Drafting, DraftModel, SamplingParams

if TYPE_CHECKING:
    from blockdraft.targets import Target

Function = TypeVar("Function", bound=Callable[..., None])


def option(owner: type, name: str, **settings: Any) -> Any:
    """Option for a field of a dataclass, with the field's text in the docstring as its help."""
    return typer.Option(help=explain_option(owner, name), **settings)


def with_options(command: Function) -> Function:
    """Give a command one option for each field of its parameters that are dataclasses, in the place of those."""
    kind = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, tuple[type, list[str]]] = {}
    shown = list[inspect.Parameter]()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        owner = parameter.annotation
        if not is_dataclass(owner):
            shown.append(parameter.replace(kind=kind))
            continue
        assert isinstance(owner, type)
        groups[parameter.name] = owner, [field.name for field in fields(owner)]
        shown += [
            inspect.Parameter(each.name, kind, default=each.default, annotation=_annotation(owner, each.name))
            for each in fields(owner)
        ]

    @wraps(command)
    def whole(**given: Any) -> None:
        made = {name: owner(**{each: given.pop(each) for each in names}) for name, (owner, names) in groups.items()}
        command(**made, **given)

    whole.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return whole  # type: ignore[return-value]


def _annotation(owner: type, name: str) -> Any:
    """Annotation of a field for typer: its own if that is an option, else an option of its plain type. The class itself
    checks the values."""
    hint = get_type_hints(owner, include_extras=True)[name]
    if any(isinstance(each, OptionInfo) for each in getattr(hint, "__metadata__", ())):
        return hint
    plain = get_type_hints(owner)[name]
    kinds = get_args(plain) if NoneType in get_args(plain) else (plain,)
    kind = next(each for each in kinds if each is not NoneType)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    kind = type(choices[0]) if choices else kind
    shown = option(owner, name, metavar="|".join(map(str, choices)) or None)
    return Annotated[kind | None if NoneType in kinds else kind, shown]


def extent(name: str, text: str | None) -> Any:
    """The number that an option's text means; "auto" and None stay as they are."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it must be a whole number or auto.") from None


def tell_unused(temperatures: Sequence[float], others: Iterable[str] = (), **options: Any) -> None:
    """Say on standard error what changes nothing because every temperature is 0.

    Args:
        others: Names of methods that sample.
        options: Values of options that only sampling heeds; one that has its default is not mentioned.
    """
    defaults = {"sampled": Drafting.sampled, **vars(SamplingParams)}
    idle = [f"--{name.replace('_', '-')}" for name, value in options.items() if value != defaults[name]]
    idle += others
    if idle and not any(temperatures):
        verb = "changes" if len(idle) == 1 else "change"
        loading.tell(
            f"{' and '.join(idle)} {verb} nothing at temperature 0, which decodes greedily; add --temperature T."
        )


def drafter_or_lookup(target: str | None, drafter: str | None) -> str | None:
    """The drafter to answer with: the named one, or None for the target's bundled one, or prompt_lookup where none is
    known, which standard error says."""
    if drafter is not None or _has_drafter(target):
        return drafter
    loading.tell(
        f"No drafter is known for {target}: prompt_lookup drafts, which guesses what repeats. To make one: blockdraft "
        f"fit --target {target} --out DIR."
    )
    return "prompt_lookup"


def need_drafter(target: str | None, drafter: str | None, otherwise: str, lookup: bool = True) -> None:
    """Raise a UsageError if no drafter is named, and there is none for the target.

    Args:
        otherwise: Another remedy, for the message.
        lookup: Whether prompt_lookup does for a model of the catalogue without a bundled drafter; standard error says
            so.
    """
    if drafter is None and not _has_drafter(target, lookup):
        raise UsageError(
            f"No drafter is known for {target}; add --drafter DIR, {otherwise}, or make one: "
            f"blockdraft fit --target {target} --out DIR."
        )


def _has_drafter(target: str | None, lookup: bool = True) -> bool:
    """Whether a drafter is known for a target, as in `need_drafter`. Raises a UsageError if there is no such target."""
    if target is None or target == "bundled":
        return True
    from blockdraft.drafters import bundled_for
    from blockdraft.models import bundled_drafter, find, located, model_of

    path = Path(target).expanduser()
    model = model_of(path) if path.exists() else find(target)
    if model is not None:
        located(target)
        bundled = bundled_drafter(model) is not None
        if lookup and not bundled:
            loading.tell(f"No drafter is bundled for {model.id}: prompt_lookup drafts, which guesses what repeats.")
        if lookup or bundled:
            return True
    if path.exists() and bundled_for(path) is not None:
        return True
    is_path = target.startswith(("/", "./", "../", "~")) or ("/" not in target and model is None)
    if is_path and not path.exists():
        raise UsageError(
            f"There is no {target}; --target takes the folder or hub name of a model, a GGUF file, or a name that "
            "`blockdraft models` lists."
        )
    if target.endswith(".gguf"):
        from blockdraft.formats.gguf import open_gguf

        open_gguf(path)  # says so where the file is broken
    return False


_TARGET = (
    "Model whose output counts: a Hugging Face folder or hub name, a GGUF file, or a name that `blockdraft models` "
    "lists, once it is pulled. By default "
)
TargetFolder = Annotated[
    str | None,
    typer.Option(metavar="DIR|NAME", help=f"{_TARGET}SmolLM2, if it has been pulled, else the bundled tiny model."),
]
# Data and drafters go with one target, so this default does not depend on what has been pulled.
TrainingTarget = Annotated[
    str | None, typer.Option("--target", metavar="DIR|NAME", help=f"{_TARGET}the bundled tiny model.")
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="PEFT adapter, such as a LoRA, that is merged into the target: a folder or hub name."
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of the target's repository on the hub.")
]
DrafterPlace = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="DIR|NAME",
        help="Drafter: the folder or GGUF file of one, or the folder of a smaller language model or block-diffusion "
        "model with the target's tokens. Or a name: mtp (the head in the target's own folder), prompt_lookup (repeats "
        "the text), none (plain decoding), bundled (the default, for targets that have one), bundled-dflash "
        "(the tiny model's DFlash drafter, which other engines read too). A + joins several, as in prompt_lookup+DIR.",
    ),
]
AutoBlockSize = Annotated[
    str | None,
    typer.Option(
        "--block-size",
        metavar="N|auto",
        help='Tokens of a block: the last token of the text and the guesses after it. "auto" guesses as many as pay '
        "in each cycle, or none, and is the default without a tree budget.",
    ),
]
TreeBudget = Annotated[str | None, option(Drafting, "tree_budget", metavar="N|auto")]
BlockSize = Annotated[str | None, option(Drafting, "block_size", metavar="N|auto")]
DraftWindow = Annotated[int | None, option(Drafting, "draft_window", metavar="N")]
Sampled = Annotated[
    bool,
    typer.Option(
        "--sampled",
        help="At a temperature, sample guesses from the drafter's distribution instead of taking the likeliest. "
        "Answers have the target's distribution either way; here the tokens of a seed depend on the drafter.",
    ),
]
DraftPasses = Annotated[int | None, option(Drafting, "draft_passes", metavar="N")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16",
        help="Numbers of weights and arithmetic; by default the checkpoint's own, and float32 where a CPU lacks it.",
    ),
]
TargetBackend = Annotated[
    Backend,
    typer.Option(
        "--backend",
        metavar="auto|hf|jax|mlx|native",
        help="What runs the target: native, our own decoder; hf, transformers; mlx, mlx-lm (Apple silicon); jax, JAX "
        "(TPUs); auto, native if it knows the model.",
    ),
]
Threads = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Threads on a CPU; auto measures once which number is fastest, unless OMP_NUM_THREADS is set.",
    ),
]
CompileForward = Annotated[
    Compile,
    typer.Option(
        "--compile",
        metavar="auto|on|off",
        help="Compiled forward of the native decoder. On a CPU a library of the package runs it, or the machine's C "
        "compiler makes one, once; on fails if there is none. On an NVIDIA GPU on captures CUDA graphs, and auto does "
        "not.",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="int8|int4|fp8",
        help="Bits to which the target's weights are rounded; the rounded model is then the target. int4 is for CPUs, "
        "fp8 for NVIDIA GPUs.",
    ),
]
RoundDrafter = Annotated[
    bool,
    typer.Option(
        "--round-drafter/--keep-drafter",
        help="Whether the drafter is rounded as the target is, or to 8 bits beside a target in bfloat16; to fewer if "
        "it was trained with qat_bits.",
    ),
]
KeysValues = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="int8",
        help="Bits of keys and values; int8 takes half the memory of bfloat16, and is for CPUs.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Greedy answers equal those of plain decoding, near ties included, whatever is drafted and in any batch. "
        "A target that is compiled for a CPU is so already; others become slower.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where the target runs, such as cpu or cuda:1; by default the first GPU, else the CPU."),
]


@dataclass(frozen=True)
class TargetOptions:
    """Which target a command decodes with, and how it runs."""

    target: TargetFolder = None
    adapter: Adapter = None
    revision: Revision = None
    dtype: Dtype = None
    device: Device = None
    backend: TargetBackend = DEFAULT_BACKEND
    threads: Threads = "auto"
    compile: CompileForward = DEFAULT_COMPILE
    quantize: Quantize = None
    kv_dtype: KeysValues = None
    round_drafters: RoundDrafter = True
    exact: Exact = False

    def load(self, drafter: str | None = None) -> Target:
        """Load the target, once what can be known without it is checked: of `drafter`, whether it is there."""
        from blockdraft.drafters import check_place
        from blockdraft.models import TINY, default_target

        how = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.target is None and default_target().is_relative_to(TINY) and sys.stderr.isatty():
            loading.tell("This is the bundled tiny model; `blockdraft pull smollm2` gets a real one (93 MB).")
        how["threads"] = threads = extent("threads", self.threads)
        if drafter is not None:
            check_place(drafter)
        if isinstance(threads, int) and threads > (processors := os.cpu_count() or threads):
            loading.tell(
                f"--threads is {threads}, more than this machine's {processors} processors; it may be very slow."
            )
        return loading.load(how.pop("target"), **how)


@dataclass(frozen=True)
class DrafterOptions(DraftModel):
    """How drafters run. The draft vocabulary is read at once, before targets load."""

    draft_vocab: Annotated[str | None, option(DraftModel, "draft_vocab", metavar="N|FILE")] = DraftModel.draft_vocab

    def __post_init__(self) -> None:
        if self.draft_vocab is not None:
            from blockdraft.drafters import check_draft_vocab

            check_draft_vocab(self.draft_vocab)


@dataclass(frozen=True)
class RecordOptions:
    """Part of a dataset that is read."""

    split: Annotated[str, option(RecordSettings, "split")] = RecordSettings.split
    subset: Annotated[str | None, option(RecordSettings, "subset")] = RecordSettings.subset

    def settings(self, limit: int | None = RecordSettings.limit) -> RecordSettings:
        return RecordSettings(limit=limit, **asdict(self))


@dataclass(frozen=True)
class FieldOptions(RecordOptions):
    """Part of a dataset that is read, and the fields that hold its texts."""

    text_field: Annotated[str | None, option(RecordSettings, "text_field")] = RecordSettings.text_field
    prompt_field: Annotated[str | None, option(RecordSettings, "prompt_field")] = RecordSettings.prompt_field
    response_field: Annotated[str | None, option(RecordSettings, "response_field")] = RecordSettings.response_field


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of an answer, its end, and how far it is drafted."""

    temperature: Annotated[float, option(SamplingParams, "temperature")] = SamplingParams.temperature
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p
    min_p: Annotated[float, option(SamplingParams, "min_p")] = SamplingParams.min_p
    repetition_penalty: Annotated[float, option(SamplingParams, "repetition_penalty")] = (
        SamplingParams.repetition_penalty
    )
    presence_penalty: Annotated[float, option(SamplingParams, "presence_penalty")] = SamplingParams.presence_penalty
    frequency_penalty: Annotated[float, option(SamplingParams, "frequency_penalty")] = SamplingParams.frequency_penalty
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the answer, which is cut before it. Repeat the option for several."),
    ] = None
    seed: Annotated[int | None, option(SamplingParams, "seed")] = SamplingParams.seed
    block_size: AutoBlockSize = None
    tree_budget: TreeBudget = None
    draft_window: DraftWindow = None
    draft_passes: DraftPasses = None
    sampled: Sampled = Drafting.sampled

    def params(self, max_new_tokens: int) -> SamplingParams:
        names = {each.name for each in fields(SamplingParams)} & {each.name for each in fields(self)}
        given = {name: getattr(self, name) for name in names}
        params = SamplingParams(max_new_tokens, **given | {"stop": self.stop or ()})
        tell_unused([self.temperature], top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, sampled=self.sampled)
        return params

    @property
    def drafting(self) -> Drafting:
        """How far to draft: "auto" if neither size is given."""
        size, budget = self.block_size, self.tree_budget
        if size is None and budget is None:
            size = "auto"
        draft_tokens = Drafting.tree_budget if budget is None else extent("tree_budget", budget)
        return Drafting(extent("block_size", size), draft_tokens, self.sampled, self.draft_window, self.draft_passes)
