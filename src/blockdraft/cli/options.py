"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from blockdraft.data.settings import RowSettings
from blockdraft.errors import UsageError
from blockdraft.settings import explain_option
from blockdraft.types import Backend, Compile, Drafting, SamplingParams

Command = TypeVar("Command", bound=Callable[..., None])


def option(owner: type, name: str, **settings: Any) -> Any:
    """The option of a field of this dataclass, explained as in its docstring."""
    return typer.Option(help=explain_option(owner, name), **settings)


def with_options(command: Command, last: Callable[[str], bool] = lambda name: False) -> Command:
    """Give a command the options that are the fields of a dataclass, in the place of each parameter that is one.

    Args:
        last: Says of an option by its name whether it comes after all others.
    """
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
    shown.sort(key=lambda parameter: last(parameter.name))

    @wraps(command)
    def whole(**given: Any) -> None:
        made = {place: owner(**{name: given.pop(name) for name in names}) for place, (owner, names) in groups.items()}
        command(**made, **given)

    whole.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return whole  # type: ignore[return-value]


def _annotation(owner: type, name: str) -> Any:
    """Of a field, for typer: as it is where it is an option, else one that takes anything of its plain type, since the
    class checks its values itself."""
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
    """A number of tokens or "auto", as `Drafting` takes it."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it must be a whole number or auto.") from None


def need_drafter(target: str | None, drafter: str | None, otherwise: str) -> None:
    """Raise a UsageError where a target of one's own has no drafter; `otherwise` is what else can be done."""
    if target is not None and target != "bundled" and drafter is None:
        is_path = target.startswith(("/", "./", "../", "~")) or "/" not in target
        if is_path and not Path(target).expanduser().exists():
            raise UsageError(f"There is no {target}; --target takes the folder or hub name of a model, or a GGUF file.")
        from blockdraft.formats.gguf import is_gguf

        folder = "FOLDER" if is_gguf(target) else target  # fit takes the folder that a GGUF file was made from
        raise UsageError(
            f"No drafter is known for {target}; add --drafter DIR, {otherwise}, or make one: "
            f"blockdraft fit --target {folder} --out DIR."
        )


TargetFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Target: a Hugging Face model folder or hub name, or a GGUF file; by default the bundled one.",
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Adapter of PEFT for the target, such as a LoRA, as a folder or hub name; it is merged into the weights.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of the target, where that is a hub name.")
]
DrafterPlace = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="DIR|NAME",
        help="Drafter: the folder or GGUF file of a drafter, the folder of a smaller language model or of a "
        "block-diffusion model with the target's tokens, mtp to use the head in the target's own folder, prompt_lookup "
        "to guess what the text repeats, none to decode plainly, or bundled to use the one that comes along, which "
        "fits the bundled target and what was made of it, and is the default there, or bundled-dflash to use the "
        "DFlash one of these, which other engines read too. Several with + between them, such as prompt_lookup+DIR, "
        "draft together.",
    ),
]
AutoBlockSize = Annotated[
    str | None,
    typer.Option(
        "--block-size",
        metavar="N|auto",
        help='Tokens of a block: the last one said and the guesses after it. "auto", the default unless there is a '
        "tree budget, lets each cycle use as many as pay, or none.",
    ),
]
TreeBudget = Annotated[str | None, option(Drafting, "tree_budget", metavar="N|auto")]
BlockSize = Annotated[str | None, option(Drafting, "block_size", metavar="N|auto")]
DraftWindow = Annotated[int | None, option(Drafting, "draft_window", metavar="N")]
DraftPasses = Annotated[int | None, option(Drafting, "draft_passes", metavar="N")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of weights and arithmetic: float32, bfloat16 or float16; by default float32 on a CPU and bfloat16 "
        "elsewhere."
    ),
]
TargetBackend = Annotated[
    Backend,
    typer.Option(
        "--backend",
        metavar="auto|hf|native",
        help="What runs the target: native, our own decoder; hf, transformers; or native wherever it knows the model.",
    ),
]
Threads = Annotated[
    str,
    typer.Option(
        metavar="N|auto", help="Threads on a CPU; auto measures once what is fastest, unless OMP_NUM_THREADS is set."
    ),
]
CompileForward = Annotated[
    Compile,
    typer.Option(
        "--compile",
        metavar="auto|on|off",
        help="Run the native decoder's forward compiled: by a library that came with the package, or else by this "
        "machine's C compiler, once; on fails where there is none. "
        "On an NVIDIA GPU, 'on' captures CUDA graphs and 'auto' leaves it.",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="int8|int4|fp8",
        help="Round the target's weights; the rounded model is then the target. int4 is for CPUs, fp8 for NVIDIA GPUs.",
    ),
]
RoundDrafter = Annotated[
    bool,
    typer.Option(
        "--round-drafter/--keep-drafter",
        help="Whether a drafter's weights are rounded to as few bits as the target's are.",
    ),
]
KeysValues = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="int8",
        help="Keep keys and values in 8 bits, which takes half the memory of bfloat16; for CPUs.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Let greedy answers be those of plain decoding, near ties included, whatever is drafted and in any batch. "
        "A target that is compiled for a CPU is so already; others become slower.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where the target runs, such as cpu or cuda:1; by default the first GPU if there is one, else cpu."
    ),
]


@dataclass(frozen=True)
class RowOptions:
    """What of a dataset is read."""

    split: Annotated[str, option(RowSettings, "split")] = RowSettings.split
    subset: Annotated[str | None, option(RowSettings, "subset")] = RowSettings.subset

    def rows(self, limit: int | None = RowSettings.limit) -> RowSettings:
        return RowSettings(limit=limit, **asdict(self))


@dataclass(frozen=True)
class FieldOptions(RowOptions):
    """The same, and where in a row it stands."""

    text_field: Annotated[str | None, option(RowSettings, "text_field")] = RowSettings.text_field
    prompt_field: Annotated[str | None, option(RowSettings, "prompt_field")] = RowSettings.prompt_field
    response_field: Annotated[str | None, option(RowSettings, "response_field")] = RowSettings.response_field


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are decoded: what they are drawn from, where they end, and how far they are drafted."""

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
        typer.Option(help="A text that ends an answer, which is cut before it. Repeat the option for several."),
    ] = None
    seed: Annotated[int | None, option(SamplingParams, "seed")] = SamplingParams.seed
    block_size: AutoBlockSize = None
    tree_budget: TreeBudget = None
    draft_window: DraftWindow = None
    draft_passes: DraftPasses = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        names = {each.name for each in fields(SamplingParams)} & {each.name for each in fields(self)}
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(max_new_tokens, **given | {"stop": self.stop or ()})

    @property
    def drafting(self) -> Drafting:
        """ "auto" where neither size is named."""
        size, budget = self.block_size, self.tree_budget
        if size is None and budget is None:
            size = "auto"
        guesses = Drafting.tree_budget if budget is None else extent("tree_budget", budget)
        return Drafting(
            extent("block_size", size), guesses, draft_window=self.draft_window, draft_passes=self.draft_passes
        )
