"""The command line, one file a command. What takes long to import is imported when a command runs, not before."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated, Any

import typer

from blockdraft.cli.bench import bench
from blockdraft.cli.cache import cache
from blockdraft.cli.calibrate import calibrate
from blockdraft.cli.chat import chat
from blockdraft.cli.data import data
from blockdraft.cli.diffusion import diffusion
from blockdraft.cli.doctor import doctor
from blockdraft.cli.env import env
from blockdraft.cli.export import export
from blockdraft.cli.features import features
from blockdraft.cli.fit import fit
from blockdraft.cli.generate import generate
from blockdraft.cli.inspect import inspect as inspect_checkpoint
from blockdraft.cli.launch import launch
from blockdraft.cli.prompts import prompts
from blockdraft.cli.push import push
from blockdraft.cli.quantize import quantize
from blockdraft.cli.serve import serve
from blockdraft.cli.train import RecipeCommand, train
from blockdraft.errors import BlockdraftError

app = typer.Typer(
    help="Lossless fast decoding of language models with block-diffusion drafters. To begin, try "
    "`blockdraft chat`; `blockdraft COMMAND --help` explains a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # disk, quota, or largest size of a file
RUN, TRAIN, MEASURE, OTHER = "Run models", "Make a drafter of your own", "Measure", "This machine"


def _add(command: Callable[..., None], panel: str, **settings: Any) -> None:
    """Its docstring is the help, which would keep the line breaks of the source from the second paragraph on."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    told = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(rich_help_panel=panel, help=told, **settings)(command)


_add(generate, RUN)
_add(chat, RUN)
_add(serve, RUN)
_add(launch, RUN)
_add(quantize, RUN)
_add(fit, TRAIN)
_add(prompts, TRAIN)
_add(data, TRAIN)
_add(features, TRAIN)
_add(train, TRAIN, cls=RecipeCommand)
_add(export, TRAIN)
_add(push, TRAIN)
_add(bench, MEASURE)
_add(calibrate, MEASURE)
_add(doctor, MEASURE)
_add(inspect_checkpoint, OTHER)
_add(env, OTHER)
app.add_typer(diffusion, name="diffusion", rich_help_panel=RUN)
app.add_typer(cache, name="cache", rich_help_panel=OTHER)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"blockdraft {version('blockdraft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that the arguments of the process name, and exit.

    The exit code is 0, 2 for bad input of any kind, 1 for a request that fails, as where a model computes no finite
    numbers, or a full disk, all with the reason on standard error, or 130 after Ctrl-C.
    """
    try:
        app()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BlockdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"error: {error}; free space, and give the command again.", file=sys.stderr)
        sys.exit(1)
