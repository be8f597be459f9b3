"""The command line. Modules that are slow to import are imported when a command runs."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from io import UnsupportedOperation
from typing import Annotated

import typer

from blockdraft.cli.bench import bench, bench_server
from blockdraft.cli.chat import chat
from blockdraft.cli.data import data, hidden_states, prompts
from blockdraft.cli.demo import demo
from blockdraft.cli.diffusion import diffusion
from blockdraft.cli.doctor import doctor
from blockdraft.cli.export import export, push
from blockdraft.cli.fit import fit
from blockdraft.cli.generate import generate
from blockdraft.cli.inspect import inspect
from blockdraft.cli.machine import cache, calibrate, env
from blockdraft.cli.models import models, pull
from blockdraft.cli.options import Commands, RecipeCommand, add
from blockdraft.cli.quantize import quantize
from blockdraft.cli.radar import radar
from blockdraft.cli.serve import serve
from blockdraft.cli.train import train
from blockdraft.errors import BlockdraftError
from blockdraft.folders import FULL

app = typer.Typer(
    cls=Commands,
    help="Lossless fast decoding of language models with block-diffusion drafters. To begin, try "
    "`blockdraft chat`; `blockdraft COMMAND --help` explains a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

run = partial(add, app, panel="Run models")
run(generate, common="target drafter quantize max_new_tokens temperature prompts compare as_json")
run(chat, common="target drafter quantize system max_new_tokens temperature")
run(serve, common="target drafter quantize host port api_key served_model_name max_batch_size")
run(demo)
run(models)
run(pull)
run(quantize, common="out bits calibrate")
app.add_typer(diffusion, name="diffusion", rich_help_panel="Run models")

make = partial(add, app, panel="Make a drafter of your own")
make(fit, common="out target data hours dry_run")
make(prompts, common="out target count held_out")
make(data, common="out target regenerate server model drafter limit max_new_tokens temperature")
make(hidden_states, "hidden-states", common="data out target target_layers dtype")
make(train, common="target data out prompts show_recipe", kind=RecipeCommand)
make(export, common="out target format type")
make(push)

measure = partial(add, app, panel="Measure")
measure(bench, common="target drafter prompts limit methods max_new_tokens temperature repeats out profile")
measure(bench_server, "bench server", common="against prompts limit concurrency max_new_tokens temperature out")
measure(calibrate, common="target drafter batch_size anew as_json")
measure(doctor, common="target drafter prompts as_json")

look = partial(add, app, panel="This machine")
look(radar, common="device model weights context batch task ram as_json")
look(inspect)
look(env)
app.add_typer(cache, name="cache", rich_help_panel="This machine")


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
