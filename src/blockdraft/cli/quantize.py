"""`blockdraft quantize`: writes a target of few bits as a checkpoint of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.options import Adapter, FieldOptions, Revision
from blockdraft.tools.quantize.settings import CalibrationSettings, QuantizeSettings

OWN = "own"  # the target writes the text
OWN_BATCH = 16


def quantize(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new checkpoint, new or empty.")],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face model folder or hub name, or a GGUF file in F16, BF16 or F32; by default the bundled "
            "tiny model.",
        ),
    ] = None,
    settings: QuantizeSettings,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Text of the kind that the target will get: files or datasets as for `blockdraft data`; repeat the "
            "option for several. own lets the target write it. Without text, each number is rounded to the nearest.",
        ),
    ] = None,
    measured: CalibrationSettings,
    records: FieldOptions,
    adapter: Adapter = None,
    revision: Revision = None,
) -> None:
    """Round a target's weights to 4 or 8 bits, and write them as a checkpoint of their own.

    The folder has the layout of compressed-tensors, and can be used like any target. With text, rounding errors are
    made to cancel out on it (calibration); perplexity is measured on a part that is held out, and the better of the
    calibrated and the plain rounding is written. The folder appears whole or not at all.
    """
    from blockdraft.cli import display
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.formats.model_folder import check_free
    from blockdraft.targets import BUNDLED, load_target_text
    from blockdraft.tools.quantize.run import quantize as round_checkpoint
    from blockdraft.tools.quantize.text import own_text, read_text

    loading.quiet()
    check_free(out)
    text = None
    if calibrate == [OWN]:
        loaded = loading.load(target or "bundled", device="cpu", adapter=adapter, revision=revision)
        with (
            display.progress("prompts, then tokens") as progress,
            Engine(loaded, load_drafter("none", target=loaded), OWN_BATCH) as engine,
        ):
            text = own_text(engine, measured, progress)
        del loaded, engine
    elif calibrate:
        text = read_text(calibrate, records.settings(), load_target_text(target or "bundled", revision), measured)
    with display.progress("parts") as progress:
        done = round_checkpoint(BUNDLED if target is None else target, out, settings, text, revision, adapter, progress)
    if done.perplexity is not None:
        console = consoles.standard()
        display.show_perplexity(console, done.perplexity)
    if text is not None:
        looked_at = f"Calibrated on {text.calibration.numel():,} tokens, measured on {text.held_out.numel():,} others."
        print(looked_at, file=sys.stderr)
    how = "calibrated" if done.is_calibrated else "rounded to the nearest"
    shares = f"{done.bytes / 1e6:,.1f} MB instead of {done.bytes_before / 1e6:,.1f}"
    print(f"{out}: {settings.bits} bits in groups of {done.group}, {how}, {shares}", file=sys.stderr)
    if text is None and settings.bits == 4:
        print("4 bits lose less quality with --calibrate FILE or --calibrate own.", file=sys.stderr)
