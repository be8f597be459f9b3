"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.errors import UsageError
from blockdraft.settings import explain_option
from blockdraft.types import Backend, Compile, Drafting


def option(owner: type, name: str, **settings: Any) -> Any:
    """The option of a field of this dataclass, explained as in its docstring."""
    return typer.Option(help=explain_option(owner, name), **settings)


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
    if target is not None and drafter is None:
        if target.startswith(("/", "./", "../", "~")) and not Path(target).expanduser().exists():
            raise UsageError(f"There is no {target}; --target takes the folder or hub name of a model, or a GGUF file.")
        from blockdraft.formats.gguf import is_gguf

        folder = "FOLDER" if is_gguf(target) else target  # fit takes the folder that a GGUF file was made from
        raise UsageError(
            f"No drafter is known for {target}; add --drafter DIR, {otherwise}, or make one: "
            f"blockdraft fit --target {folder} --out DIR."
        )


def drafting_of(block_size: str | None, tree_budget: str | None, draft_window: int | None) -> Drafting:
    """How far to draft, by options that are None unless named: "auto" if neither size is."""
    if block_size is None and tree_budget is None:
        block_size = "auto"
    budget = Drafting.tree_budget if tree_budget is None else extent("tree_budget", tree_budget)
    return Drafting(extent("block_size", block_size), budget, draft_window=draft_window)


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
AutoBlockSize = Annotated[
    str | None,
    typer.Option(
        "--block-size",
        metavar="N|auto",
        help='Tokens of a block, anchor included. "auto", the default unless there is a tree budget, lets each cycle '
        "use as many as pay, or none.",
    ),
]
TreeBudget = Annotated[str | None, option(Drafting, "tree_budget", metavar="N|auto")]
BlockSize = Annotated[str | None, option(Drafting, "block_size", metavar="N|auto")]
DraftWindow = Annotated[int | None, option(Drafting, "draft_window", metavar="N")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; by default float32 on a CPU and bfloat16 elsewhere."),
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
Device = Annotated[str | None, typer.Option(help="By default the first GPU if there is one, else cpu.")]
