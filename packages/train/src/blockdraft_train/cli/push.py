"""`blockdraft push`: a drafter's repository on the hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from pydantic import Field

from blockdraft.cli.display import tell
from blockdraft.cli.options import MAKE, CommandSpec
from blockdraft.cli.target import quiet
from blockdraft.errors import UsageError
from blockdraft.settings import Flag, settings

FolderOption = Annotated[Path | None, Flag(metavar="DIR")]


@settings
class PushSettings:
    """A drafter's repository and what its card says."""

    target: Annotated[str, Flag(metavar="DIR")] = Field(
        description="Target of the drafter: a model folder, hub name or GGUF file."
    )
    repo: Annotated[str | None, Flag(metavar="OWNER/NAME")] = Field(
        None, description="Repository of the hub to push to; without it nothing is sent."
    )
    out: FolderOption = Field(None, description="Folder for the repository's files, new or empty.")
    bench: FolderOption = Field(
        None,
        description="Folder of `blockdraft bench --out`, for the figures of the card. By default those of `blockdraft "
        "fit`, or the last tau of the training run, if they are next to the drafter.",
    )
    data: FolderOption = Field(None, description="Training data, for the card; by default those of `blockdraft fit`.")
    licence: Annotated[str | None, Flag("--license", metavar="NAME")] = Field(
        None, description="Licence for the card, such as apache-2.0."
    )
    private: bool = Field(False, description="Make a private repository.")


def push(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Folder of a drafter.")], *, options: PushSettings
) -> None:
    """Prepare a drafter's repository, with a model card and the code that transformers needs, and push it.

    With --out alone, nothing leaves this machine.
    """
    if options.repo is None and options.out is None:
        raise UsageError("Neither a repository nor a folder is given; add --repo OWNER/NAME, --out DIR, or both.")
    from blockdraft_train.push import prepare, read_drafter_records, upload

    quiet()
    records = read_drafter_records(Path(drafter), options.bench, options.data)
    for lacking, remedy in records.lacking():
        tell(f"The card does not say {lacking}; {remedy}.")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository") if options.out is None else options.out
        prepare(drafter, options.target, folder, options.repo, records, options.licence, tell)
        if options.out is not None:
            tell(f"{options.out}: {', '.join(sorted(file.name for file in options.out.iterdir()))}")
        if options.repo is not None:
            print(upload(folder, options.repo, options.private))


PUSH = CommandSpec(push, MAKE)
