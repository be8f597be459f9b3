"""The command line. Modules that take long to import are imported when a command runs."""

from __future__ import annotations

import errno
import sys
from functools import partial
from importlib.metadata import version
from typing import Annotated

import typer

from blockdraft.cli.bench import bench, bench_server, bench_suite
from blockdraft.cli.chat import chat
from blockdraft.cli.data import data, hidden_states, prompts
from blockdraft.cli.demo import demo
from blockdraft.cli.diffusion import diffusion
from blockdraft.cli.doctor import doctor
from blockdraft.cli.export import export, push
from blockdraft.cli.fit import fit
from blockdraft.cli.generate import generate
from blockdraft.cli.help import Commands, add
from blockdraft.cli.inspect import inspect as inspect_checkpoint
from blockdraft.cli.machine import cache, calibrate, env
from blockdraft.cli.models import models, pull
from blockdraft.cli.quantize import quantize
from blockdraft.cli.radar import radar
from blockdraft.cli.serve import serve
from blockdraft.cli.train import RecipeCommand, train
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
run(generate, short="target drafter quantize max_new_tokens temperature prompts compare as_json")
run(chat, short="target drafter quantize system max_new_tokens temperature")
run(serve, short="target drafter quantize host port api_key served_model_name max_batch_size")
run(demo)
run(models)
run(pull)
run(quantize, short="bits calibrate")
app.add_typer(diffusion, name="diffusion", rich_help_panel="Run models")

make = partial(add, app, panel="Make a drafter of your own")
make(fit, short="target data hours dry_run")
make(prompts, short="target count held_out")
make(data, short="target regenerate server model drafter limit max_new_tokens temperature")
make(hidden_states, short="target target_layers dtype")
make(train, short="target data out prompts_file show_recipe", kind=RecipeCommand)
make(export, short="target to_format weights")
make(push)

measure = partial(add, app, panel="Measure")
measure(bench, short="target drafter prompts limit methods max_new_tokens temperature repeats out profile")
measure(bench_server, "bench server", short="against prompts limit concurrency max_new_tokens temperature out")
measure(bench_suite, "bench suite", short="target drafter methods suite_data tasks limit temperature out")
measure(calibrate, short="target drafter batch_size anew as_json")
measure(doctor, short="target drafter prompts as_json")

look = partial(add, app, panel="This machine")
look(radar, short="device model weights context batch task ram as_json")
look(inspect_checkpoint, "inspect")
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
        if error.errno == errno.ENAMETOOLONG:
            print(f"error: {str(error.filename)[:60]!r}... is too long to be a path or name.", file=sys.stderr)
            sys.exit(2)
        if error.errno not in FULL:
            raise
        print(f"error: {error}; free space, and give the command again.", file=sys.stderr)
        sys.exit(1)
