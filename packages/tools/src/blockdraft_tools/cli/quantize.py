"""`blockdraft quantize`: writes a quantized target as a checkpoint of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from blockdraft.cli import display
from blockdraft.cli.display import new_table, standard, tell
from blockdraft.cli.options import DATA, MODEL, RUN, CommandSpec, Only
from blockdraft.cli.target import Folder, TargetSettings, quiet
from blockdraft.settings import Flag, settings
from blockdraft_tools.quantize.settings import CalibrationSettings, QuantizeSettings

if TYPE_CHECKING:
    from blockdraft_tools.quantize.run import Perplexity


@settings
class QuantizeOut:
    """What `blockdraft quantize` reads and writes."""

    out: Folder = Field(description="Folder of the new checkpoint, new or empty.")
    calibrate: Annotated[tuple[str, ...], Flag(metavar="SOURCE", repeat=True, panel=DATA)] = Field(
        (),
        description="Text of the kind that the target will get: a text file, JSON lines with `messages`, `text` or "
        "`prompt` and `response`, or a folder that `blockdraft data` made of anything else; repeat the option for "
        "several. Without text, weights are rounded to the nearest value.",
    )


def quantize(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face model folder or hub name, or a GGUF file in F16, BF16 or F32; by default the bundled "
            "tiny model.",
        ),
    ] = None,
    options: QuantizeOut,
    settings: QuantizeSettings,
    calibration: CalibrationSettings,
    model: Annotated[TargetSettings, Only("adapter revision", MODEL)],
) -> None:
    """Quantize a target's weights to 4 or 8 bits, and write a checkpoint.

    The folder has the layout of compressed-tensors, and can be used like any target. With text, rounding errors are
    made to cancel out on it (calibration). Perplexity is measured on a held-out part, and the better of the calibrated
    and the plain rounding is written. The folder appears whole or not at all.
    """
    from blockdraft.targets import BUNDLED, load_target_text
    from blockdraft_tools.model_folder import check_free
    from blockdraft_tools.quantize.run import quantize as quantize_checkpoint
    from blockdraft_tools.quantize.text import read_text

    quiet()
    check_free(options.out)
    name = target or "bundled"
    text = None
    if options.calibrate:
        text = read_text(options.calibrate, load_target_text(name, model.revision), calibration)
    with display.progress("parts") as progress:
        place = BUNDLED if target is None else target
        done = quantize_checkpoint(place, options.out, settings, text, model.revision, model.adapter, progress)
    if done.perplexity is not None:
        show_perplexity(done.perplexity)
    if text is not None:
        tell(f"Calibrated on {text.calibration.numel():,} tokens, measured on {text.held_out.numel():,} others.")
    rounding = "calibrated" if done.is_calibrated else "rounded to the nearest"
    sizes = f"{done.bytes / 1e6:,.1f} MB instead of {done.bytes_before / 1e6:,.1f}"
    tell(f"{options.out}: {settings.bits} bits in groups of {done.group}, {rounding}, {sizes}")
    if text is None and settings.bits == 4:
        tell("4 bits lose less quality with --calibrate FILE.")


def show_perplexity(perplexity: Perplexity) -> None:
    """Print a table of perplexities before and after quantization."""
    console = standard()
    table = new_table(console, "weights", ">perplexity", ">over the model's own")
    for name, value in (
        ("original", perplexity.source),
        ("rounded to the nearest", perplexity.nearest),
        ("calibrated", perplexity.calibrated),
    ):
        table.add_row(name, f"{value:.3f}", f"{value / perplexity.source:.4f}")
    console.print(table)


QUANTIZE = CommandSpec(quantize, RUN, common="out bits calibrate")
