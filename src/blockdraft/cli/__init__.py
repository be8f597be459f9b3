"""The command line. Modules that are slow to import are imported when a command runs."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from io import UnsupportedOperation
from typing import Annotated

import typer

from blockdraft.cli.chat import chat
from blockdraft.cli.demo import demo
from blockdraft.cli.generate import generate
from blockdraft.cli.machine import cache, env
from blockdraft.cli.models import models, pull
from blockdraft.cli.options import MACHINE, RUN, Commands, CommandSpec
from blockdraft.cli.serve import serve
from blockdraft.errors import BlockdraftError
from blockdraft.folders import FULL

Commands.specs = {
    "generate": CommandSpec(
        generate, RUN, common="target drafter quantize max_new_tokens temperature prompts compare as_json"
    ),
    "chat": CommandSpec(chat, RUN, common="target drafter quantize system max_new_tokens temperature"),
    "serve": CommandSpec(
        serve, RUN, common="target drafter quantize host port api_key served_model_name max_batch_size"
    ),
    "demo": CommandSpec(demo, RUN),
    "models": CommandSpec(models, RUN),
    "pull": CommandSpec(pull, RUN),
    "env": CommandSpec(env, MACHINE),
    "cache": CommandSpec(cache, MACHINE),
}

app = typer.Typer(
    cls=Commands,
    help="Lossless fast decoding of language models with block-diffusion drafters. To begin, try "
    "`blockdraft chat`; `blockdraft COMMAND --help` explains a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit.

    The exit code is 0; 2 for bad input; 1 for a request that fails, for instance where a model computes numbers that
    are not finite, or for a full disk; or 130 after Ctrl-C. Standard error gives the reason.

    Args:
        arguments: Words of the command line; None takes those of the process.
    """
    logging.getLogger("blockdraft").setLevel(logging.INFO)
    if logging.lastResort is not None:  # prints to standard error what no other handler takes
        logging.lastResort.setLevel(logging.INFO)
    try:
        app(arguments, prog_name="blockdraft")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BlockdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"error: {str(error.filename)[:60]!r}... is too long to be a path or name.", file=sys.stderr)
            sys.exit(2)
        if error.errno not in FULL:
            raise
        with suppress(UnsupportedOperation):  # what is left to print would fail again at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: {error}; free space, and give the command again.", file=sys.stderr)
        sys.exit(1)
