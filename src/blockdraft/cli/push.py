"""`blockdraft push`: a drafter on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.errors import UsageError


def push(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="The folder of a drafter.")],
    target: Annotated[str, typer.Option(metavar="DIR", help="Its target: a model folder or hub name.")],
    repo: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Push to this repository of the hub; without it nothing is sent."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the repository's files here; new or empty.")
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Figures for the card: what `blockdraft bench --out` wrote. By default those of `blockdraft fit`, or "
            "the last tau of the training run, where they lie beside the drafter.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its training data, for the card; by default those of `blockdraft fit`."),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="For the card, such as apache-2.0.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others do not see.")] = False,
) -> None:
    """Prepare a drafter's repository, with a model card and what transformers needs to draft with it, and push it.

    With --out alone nothing leaves this machine.
    """
    if repo is None and out is None:
        raise UsageError("Neither a repository nor a folder is named; add --repo OWNER/NAME, --out DIR, or both.")
    from blockdraft.tools.deploy.push import known_of, prepare, upload

    loading.quiet()
    known = known_of(Path(drafter), bench, data)
    for lacking, remedy in known.lacking():
        loading.tell(f"The card does not say {lacking}; {remedy}.")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository") if out is None else out
        prepare(drafter, target, folder, repo, known, licence, loading.tell)
        if out is not None:
            print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}", file=sys.stderr)
        if repo is not None:
            print(upload(folder, repo, private))
