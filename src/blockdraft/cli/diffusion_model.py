"""Options that the commands of `blockdraft diffusion` share, and how they load a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import loading

if TYPE_CHECKING:
    from blockdraft.diffusion.model import DiffusionModel

Model = Annotated[
    Path,
    typer.Option(metavar="DIR", help="A block-diffusion model, made by `blockdraft diffusion convert` or `train`."),
]
Device = Annotated[
    str | None, typer.Option(help="Where the model runs, such as cpu or cuda:1; by default the first GPU, else cpu.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16", help="Of the weights; by default float32 on a CPU and bfloat16 elsewhere."
    ),
]
BlockSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens of a block; by default what the model was made for.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def load(path: Path, device: str | None, dtype: str | None, block_size: int | None) -> DiffusionModel:
    from blockdraft.diffusion.folder import load_model

    loading.quiet()
    return load_model(path, device, dtype, block_size)
