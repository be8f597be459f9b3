"""`blockdraft data`: conversations or text to training data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import Adapter, Device, Dtype, Revision, TargetBackend, TargetFolder, option
from blockdraft.data.settings import DataSettings, RowSettings
from blockdraft.errors import UsageError
from blockdraft.types import DEFAULT_BACKEND, SamplingParams

SAMPLING = DataSettings.sampling


def data(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="JSON-lines, JSON or Parquet files, folders of them, or datasets of the hub by name. Rows are chats "
            '({"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]}), '
            '{"prompt", "response"}, {"turns": ["prompt", ...]} or {"text"}.',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data; it may hold part of them already.")],
    target: TargetFolder = None,
    adapter: Adapter = None,
    revision: Revision = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Have the target write the responses, whatever the rows hold.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Have a server with OpenAI's chat completions write them, such as http://localhost:8000/v1; its key, "
            "if it takes one, is read from BLOCKDRAFT_SERVER_KEY. By default our own engine does.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The target's name on the server.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Drafter for our own engine, as for generate; by default none."),
    ] = None,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SAMPLING.max_new_tokens,
    temperature: Annotated[float, option(SamplingParams, "temperature")] = SAMPLING.temperature,
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SAMPLING.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SAMPLING.top_p,
    seed: Annotated[int, typer.Option(help="Each answer gets a seed of its own, which follows from this one.")] = (
        SAMPLING.seed or 0
    ),
    batch_size: Annotated[int, option(DataSettings, "batch_size")] = DataSettings.batch_size,
    length: Annotated[int | None, option(DataSettings, "length")] = DataSettings.length,
    limit: Annotated[int | None, option(RowSettings, "limit")] = RowSettings.limit,
    split: Annotated[str, option(RowSettings, "split")] = RowSettings.split,
    subset: Annotated[str | None, option(RowSettings, "subset")] = RowSettings.subset,
    text_field: Annotated[str | None, option(RowSettings, "text_field")] = RowSettings.text_field,
    prompt_field: Annotated[str | None, option(RowSettings, "prompt_field")] = RowSettings.prompt_field,
    response_field: Annotated[str | None, option(RowSettings, "response_field")] = RowSettings.response_field,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template to use instead of the target's own.")
    ] = None,
    template_args: Annotated[str, option(DataSettings, "template_args", metavar="JSON")] = DataSettings.template_args,
    split_turns: Annotated[bool, option(DataSettings, "split_turns")] = DataSettings.split_turns,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON instead of a summary.")] = False,
) -> None:
    """Turn conversations or text into the tokens and loss masks that a drafter is trained on.

    A drafter learns best from what the target says itself: --regenerate. An interrupted run goes on where it stopped
    when the command is given again.
    """
    if (server is None) != (model is None):
        raise UsageError("A server takes both --server URL and --model NAME.")
    if (server or drafter) and not regenerate:
        raise UsageError("--server and --drafter are about regenerated responses; add --regenerate.")
    if adapter and (server or not regenerate):
        raise UsageError("--adapter is for our own engine; add --regenerate, without --server, or leave it out.")
    if server and drafter:
        raise UsageError("--drafter is for our own engine; leave it out with --server.")

    from blockdraft.cli import display
    from blockdraft.data.answerers import Answerer, EngineAnswerer, ServerAnswerer
    from blockdraft.data.prepare import Preparation
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.targets import load_target_text, target_fingerprint

    loading.quiet()
    rows = RowSettings(split, subset, limit, text_field, prompt_field, response_field)
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed)
    settings = DataSettings(length, template_args, split_turns, sampling=sampling, batch_size=batch_size)
    loaded = (
        loading.load(target, dtype, device, backend, adapter=adapter, revision=revision)
        if regenerate and server is None
        else None
    )
    text = load_target_text(target, revision) if loaded is None else loaded
    if loaded is not None:
        settings = replace(settings, writer="target", author=target_fingerprint(loaded))
    elif server is not None:
        settings = replace(settings, writer="server", author=model)
    if chat_template is not None and text.tokenizer is not None:
        try:
            text.tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{chat_template} cannot be read ({error}).") from error
    print("reading and checking the rows ...", file=sys.stderr, flush=True)
    preparation = Preparation(out, text, sources, rows, settings)
    print(f"{preparation.total} rows, {preparation.missing} to do", file=sys.stderr, flush=True)

    answerer: Answerer | None = None
    if server is not None and model is not None:
        answerer = ServerAnswerer(server, model, batch_size, preparation.encoder.template_args)
    elif loaded is not None:
        answerer = EngineAnswerer(Engine(loaded, load_drafter(drafter or "none", target=loaded), batch_size))
    arguments = {"sources": sources, "limit": limit, "split": split, "subset": subset}
    try:
        with display.progress("rows") as progress:
            manifest = preparation.run(answerer, progress, target=str(target or "bundled"), arguments=arguments)
    except KeyboardInterrupt:
        kept = len(preparation.writer.done)
        print(
            f"Interrupted; {kept} of {preparation.total} rows are kept in {out}. The same command goes on with them.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(manifest))
        return
    counts = manifest["counts"]
    print(
        f"{out}: {counts['documents']} documents of {counts['rows']} rows, {counts['tokens']} tokens, "
        f"{counts['supervised']} of them supervised ({counts['supervised'] / counts['tokens']:.0%})"
    )
    if counts["cut"]:
        print(f"cut to {preparation.length} tokens: {counts['cut']} documents")
    for reason, count in counts["left_out"].items():
        print(f"left out, {reason}: {count} rows")
