"""`blockdraft features`: the target's hidden states for training data, kept on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import Adapter, Device, Revision, TargetBackend, TargetFolder, option
from blockdraft.data.settings import FeatureDtype, FeatureSettings
from blockdraft.errors import counted
from blockdraft.settings import from_text
from blockdraft.types import DEFAULT_BACKEND


def features(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder made by `blockdraft data`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the features; it may hold part of them already.")],
    target: TargetFolder = None,
    adapter: Adapter = None,
    revision: Revision = None,
    taps: Annotated[str | None, option(FeatureSettings, "taps", metavar="N|LAYER,...")] = None,
    dtype: Annotated[FeatureDtype, option(FeatureSettings, "dtype")] = FeatureSettings.dtype,
    batch_tokens: Annotated[int, option(FeatureSettings, "batch_tokens")] = FeatureSettings.batch_tokens,
    target_dtype: Annotated[
        str | None, typer.Option(help="Of the target's weights; by default float32 on a CPU and bfloat16 elsewhere.")
    ] = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Compute what the target's tapped layers say about training data, once, so that training need not.

    It takes a lot of disk; how much is printed first. An interrupted run goes on where it stopped when the command is
    given again.
    """
    from blockdraft.cli import display
    from blockdraft.data.documents import read_data
    from blockdraft.data.features import plan_features, size
    from blockdraft.data.taps import chosen_taps

    wanted = FeatureSettings.taps if taps is None else from_text(FeatureSettings, "taps", taps)
    settings = FeatureSettings(wanted, dtype, batch_tokens)
    documents = read_data(data)
    loaded = loading.load(target, target_dtype, device, backend, adapter=adapter, revision=revision)
    layers = chosen_taps(settings.taps, loaded.num_layers)
    cache = plan_features(out, loaded, documents, layers, settings)
    print(
        f"{counted(len(documents), 'document')}, {sum(documents.lengths)} tokens, "
        f"layers {', '.join(map(str, layers))}: {size(cache.need)} to write, {size(cache.free)} free",
        file=sys.stderr,
        flush=True,
    )
    try:
        with display.progress("tokens") as progress:
            cache.write(lambda done, total: progress("features", done, total))
    except KeyboardInterrupt:
        print(f"Interrupted; what is finished is kept in {out}. The same command goes on with it.", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{out}: features of {counted(len(documents), 'document')}, layers {', '.join(map(str, layers))}")
