"""`blockdraft export` and `push`: a drafter for other engines, and on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, get_args

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import Adapter, Revision, TargetBackend, TrainingTarget
from blockdraft.errors import UsageError
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_GGUF_WEIGHTS, GGUFWeights

GGUF = "gguf"


def export(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="Drafter in any format that `generate` reads, as a folder or GGUF file; bundled is the one that comes "
            "along for this target, beside the tiny model the DFlash drafter.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder to write; new, empty, or an earlier export.")],
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    to_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format: zlab, speculators, gguf, or another of docs/export.md. By default zlab, or for other kinds "
            "of drafters their own.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="|".join(get_args(GGUFWeights)),
            help=f"Numbers of the matrices in GGUF files; by default {DEFAULT_GGUF_WEIGHTS}, which keeps a model in "
            "bfloat16 as it is.",
        ),
    ] = None,
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Hub name or folder of the target that is written into the speculators format; by default --target.",
        ),
    ] = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Write a drafter in the format that another engine reads.

    Weights keep their dtype. The speculators format adds copies of the target's embedding and head; gguf writes two
    files for llama.cpp, drafter-TYPE.gguf and target-TYPE.gguf. The folder appears whole or not at all.
    """
    from blockdraft.drafters import for_others, names
    from blockdraft.formats import find_layout
    from blockdraft.training.export import convert, format_for, usual_format

    drafter = str(for_others(drafter, target, loading.tell))
    if drafter in names():
        raise UsageError(
            f"DRAFTER is {drafter}, which has no files of its own to write; give the folder of a drafter. Which "
            "engines find an MTP head in the target's folder is in docs/export.md."
        )
    if to_format == GGUF:
        for name, given in (("target-name", target_name), ("backend", backend if backend != DEFAULT_BACKEND else None)):
            if given is not None:
                raise UsageError(f"--{name} is {given}, which does not go with --format {GGUF}; leave it out.")
        _write_gguf(drafter, Path(out), target, weights or DEFAULT_GGUF_WEIGHTS, revision, adapter)
        return
    if weights is not None:
        raise UsageError(f"--type {weights} goes with --format {GGUF}; leave it out, since weights keep their dtype.")
    to_format = to_format or usual_format(drafter)
    find_layout(to_format)
    loaded = loading.load(target or "bundled", device="cpu", backend=backend, adapter=adapter, revision=revision)
    convert(drafter, out, format_for(to_format, loaded, target, target_name, revision), loaded)
    size = sum(file.stat().st_size for file in Path(out).iterdir())
    print(f"{out}: {size / 1e6:,.1f} MB in the {to_format} format", file=sys.stderr)


def _write_gguf(
    drafter: str, out: Path, target: str | None, weights: str, revision: str | None, adapter: str | None
) -> None:
    from blockdraft.targets import BUNDLED
    from blockdraft.training.export import export_gguf

    loading.quiet()
    done = export_gguf(drafter, out, target or BUNDLED, weights, revision, adapter)  # type: ignore[arg-type]
    for note in done.notes:
        print(f"Note: {note}", file=sys.stderr)
    for file in (done.target, done.drafter):
        print(f"{file}: {file.stat().st_size / 1e6:,.1f} MB", file=sys.stderr)
    print(f"To use them: {done.line}", file=sys.stderr)


def push(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Folder of a drafter.")],
    target: Annotated[
        str, typer.Option(metavar="DIR", help="Target of the drafter: a model folder, hub name or GGUF file.")
    ],
    repo: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Repository of the hub to push to; without it nothing is sent."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the repository's files, new or empty.")
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of `blockdraft bench --out`, for the card's figures. By default those of `blockdraft fit`, or "
            "the last tau of the training run, if they lie beside the drafter.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Training data, for the card; by default those of `blockdraft fit`."),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="Licence for the card, such as apache-2.0.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
) -> None:
    """Prepare a drafter's repository, with a model card and the code that transformers needs, and push it.

    With --out alone, nothing leaves this machine.
    """
    if repo is None and out is None:
        raise UsageError("Neither a repository nor a folder is given; add --repo OWNER/NAME, --out DIR, or both.")
    from blockdraft.tools.push import known_of, prepare, upload

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
