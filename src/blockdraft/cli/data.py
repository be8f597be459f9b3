"""`blockdraft prompts`, `data` and `hidden_states`: prompts, training data and the target's features of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import (
    Adapter,
    Device,
    Dtype,
    FieldOptions,
    Quantize,
    RecordOptions,
    Revision,
    TargetBackend,
    TrainingTarget,
    option,
)
from blockdraft.data.settings import DataSettings, HiddenStateDtype, HiddenStateSettings, RecordSettings
from blockdraft.errors import Complaints, UsageError, counted
from blockdraft.settings import explain, from_text
from blockdraft.tools.fit.settings import PromptSettings
from blockdraft.types import DEFAULT_BACKEND, SamplingParams

if TYPE_CHECKING:
    from blockdraft.targets import Target, TargetText


def prompts(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for prompts.jsonl and held-out.jsonl.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Data as for `blockdraft data`. Without any, the target writes prompts of the kind it was trained on.",
            show_default=False,
        ),
    ] = None,
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    settings: PromptSettings,
    chosen: RecordOptions,
    batch_size: Annotated[int, option(DataSettings, "batch_size")] = DataSettings.batch_size,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Choose prompts for a target to answer, in random order and without repeats, and hold some out to measure on.

    Of plain texts, beginnings are taken: of the text, and of paragraphs further on. `blockdraft data --regenerate` lets
    the target answer the prompts.
    """
    from blockdraft.cli import display
    from blockdraft.data.folder import check_writable
    from blockdraft.data.records import check_sources
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.targets import load_target_text
    from blockdraft.tools.fit.prompts import read_prompts, store, write_prompts

    loading.quiet()
    records = chosen.settings(settings.pool)
    complaints = Complaints()
    with complaints.noting():
        check_writable(out)
    with complaints.noting():
        check_sources(sources or (), records)
    complaints.check()
    if sources:
        found = read_prompts(sources, records, load_target_text(target or "bundled", revision), settings)
    else:
        loaded = loading.load(target or "bundled", dtype, device, backend, adapter=adapter, revision=revision)
        with (
            display.progress("prompts") as progress,
            Engine(loaded, load_drafter("none", target=loaded), batch_size) as engine,
        ):
            found = write_prompts(engine, settings, progress)
    store(out, found)
    of = "" if found.available is None else f"{len(found.records)} of "
    told = of + counted(found.available or len(found.records), "prompt")
    print(f"{out}: {told}, {len(found.held_out)} held out", file=sys.stderr)


SAMPLING = DataSettings.sampling


def data(
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="JSON-lines, JSON, Parquet or text files, folders of them, or datasets of the hub by name. Records "
            'are chats ({"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]}), '
            '{"prompt", "response"}, {"turns": ["prompt", ...]} or {"text"}; a text file is one text.',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data, new or of an interrupted run.")],
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Have the target write the responses, whatever the records hold.")
    ] = False,
    continued: Annotated[
        int | None, typer.Option("--continue", metavar="N", help=explain(DataSettings, "continued"), show_default=False)
    ] = DataSettings.continued,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server with OpenAI's chat completions that writes the responses, such as http://localhost:8000/v1. "
            "If it asks for a key, that is read from BLOCKDRAFT_SERVER_KEY. By default our own engine writes them.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The target's name on the server.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Drafter of our own engine, as for `generate`; by default none."),
    ] = None,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SAMPLING.max_new_tokens,
    temperature: Annotated[float, option(SamplingParams, "temperature")] = SAMPLING.temperature,
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SAMPLING.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SAMPLING.top_p,
    seed: Annotated[int, typer.Option(help="Seed from which each answer's own seed follows.")] = (SAMPLING.seed or 0),
    batch_size: Annotated[int, option(DataSettings, "batch_size")] = DataSettings.batch_size,
    length: Annotated[int | None, option(DataSettings, "length")] = DataSettings.length,
    limit: Annotated[int | None, option(RecordSettings, "limit")] = RecordSettings.limit,
    chosen: FieldOptions,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template to use instead of the target's own.")
    ] = None,
    template_args: Annotated[str, option(DataSettings, "template_args", metavar="JSON")] = DataSettings.template_args,
    split_turns: Annotated[bool, option(DataSettings, "split_turns")] = DataSettings.split_turns,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    quantize: Quantize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON instead of a summary.")] = False,
) -> None:
    """Turn conversations or text into the tokens and loss masks that a drafter is trained on.

    A drafter learns best from the target's own words: use --regenerate for chats and prompts, --continue for plain
    text. A target without a chat template continues whatever it is given. The same command resumes an interrupted run.
    """
    if (server is None) != (model is None):
        raise UsageError("Only one of --server and --model is given; give both, or neither.")
    regenerate = regenerate or continued is not None
    if (server or drafter) and not regenerate:
        raise UsageError("--server and --drafter are for regenerated responses; add --regenerate or --continue N.")
    if adapter and (server or not regenerate):
        raise UsageError("--adapter is for our own engine; add --regenerate, without --server, or leave it out.")
    if quantize and (server or not regenerate):
        raise UsageError("--quantize is for our own engine; add --regenerate, without --server, or leave it out.")
    if server and drafter:
        raise UsageError("--drafter is for our own engine; leave it out with --server.")

    from blockdraft.cli import display
    from blockdraft.data.answerers import Answerer, EngineAnswerer, ServerAnswerer
    from blockdraft.data.folder import check_writable
    from blockdraft.data.prepare import Preparation, RecordReader
    from blockdraft.data.records import check_sources
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.targets import load_target_text, target_fingerprint

    loading.quiet()
    records = chosen.settings(limit)
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed)
    writer: Literal["text", "target", "server"] = "text" if not regenerate else "target" if server is None else "server"
    settings = DataSettings(
        length, template_args, split_turns, writer, continued, model, sampling=sampling, batch_size=batch_size
    )
    # Faults of the files are reported before the target is loaded, and faults of records before its weights are.
    complaints, template = Complaints(), None
    with complaints.noting():
        check_writable(out)
    with complaints.noting():
        check_sources(sources, records)
    with complaints.noting():
        template = None if chat_template is None else _read(chat_template)
    complaints.check()
    text = load_target_text(target or "bundled", revision)
    _set_template(text, template)
    RecordReader(text, sources, records, settings).check_first()
    loaded = None
    if writer == "target":
        how = {"adapter": adapter, "revision": revision, "quantize": quantize}
        loaded = loading.load(target or "bundled", dtype, device, backend, **how)
    if loaded is not None:
        _set_template(loaded, template)
        settings = replace(settings, author=target_fingerprint(loaded))
    note("reading and checking the records ...")
    preparation = Preparation(out, loaded or text, sources, records, settings)
    reader = preparation.reader
    note(f"{counted(preparation.total, 'record')}, {preparation.missing} to do")
    if limit is not None and preparation.total < limit:
        note(f"There are fewer than the {counted(limit, 'record')} that --limit allows; add sources to have more.")
    if reader.continued is not None:
        note(reader.continued_note)

    answerer: Answerer | None = None
    if server is not None and model is not None:
        answerer = ServerAnswerer(server, model, batch_size, reader.encoder.template_args)
    elif loaded is not None:
        answerer = EngineAnswerer(Engine(loaded, load_drafter(drafter or "none", target=loaded), batch_size))
    arguments = {"sources": sources, "limit": limit, "split": records.split, "subset": records.subset}
    try:
        with display.progress("records") as progress:
            manifest = preparation.run(answerer, progress, note, target=str(target or "bundled"), arguments=arguments)
    except KeyboardInterrupt:
        kept = len(preparation.writer.done)
        note(f"Interrupted; {kept} of {preparation.total} records are kept in {out}. The same command goes on.")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(manifest))
        return
    counts = manifest["counts"]
    print(
        f"{out}: {counted(counts['documents'], 'document')} of {counted(counts['rows'], 'record')}, "
        f"{counts['tokens']} tokens, {counts['supervised']} of them supervised "
        f"({counts['supervised'] / counts['tokens']:.0%})"
    )
    if counts["cut"]:
        print(f"cut to {reader.length} tokens: {counted(counts['cut'], 'document')}")
    for reason, count in counts["left_out"].items():
        print(f"left out, {reason}: {counted(count, 'record')}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{template} cannot be read ({error}).") from error


def _set_template(target: Target | TargetText, template: str | None) -> None:
    if template is not None and target.tokenizer is not None:
        target.tokenizer.chat_template = template


def hidden_states(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder made by `blockdraft data`.")],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the features, new or of an interrupted run."),
    ],
    target: TrainingTarget = None,
    adapter: Adapter = None,
    revision: Revision = None,
    target_layers: Annotated[str | None, option(HiddenStateSettings, "target_layers", metavar="N|LAYER,...")] = None,
    dtype: Annotated[HiddenStateDtype, option(HiddenStateSettings, "dtype")] = HiddenStateSettings.dtype,
    batch_tokens: Annotated[int, option(HiddenStateSettings, "batch_tokens")] = HiddenStateSettings.batch_tokens,
    target_dtype: Annotated[
        str | None,
        typer.Option(
            help="Numbers of the target's weights; by default the checkpoint's own, and float32 where a CPU lacks it."
        ),
    ] = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Store the hidden states of the target's tapped layers for training data, so that training does not compute them.

    They take a lot of disk; the size is printed first. The same command resumes an interrupted run.
    """
    from blockdraft.cli import display
    from blockdraft.data.documents import read_data
    from blockdraft.data.hidden_states import plan_hidden_states, size
    from blockdraft.data.target_layers import chosen_target_layers

    wanted = (
        HiddenStateSettings.target_layers
        if target_layers is None
        else from_text(HiddenStateSettings, "target_layers", target_layers)
    )
    settings = HiddenStateSettings(wanted, dtype, batch_tokens)
    documents = read_data(data)
    loaded = loading.load(target or "bundled", target_dtype, device, backend, adapter=adapter, revision=revision)
    layers = chosen_target_layers(settings.target_layers, loaded.num_layers)
    cache = plan_hidden_states(out, loaded, documents, layers, settings)
    print(
        f"{counted(len(documents), 'document')}, {sum(documents.lengths)} tokens, "
        f"layers {', '.join(map(str, layers))}: {size(cache.need)} to write, {size(cache.free)} free",
        file=sys.stderr,
        flush=True,
    )
    try:
        with display.progress("tokens") as progress:
            cache.write(lambda done, total: progress("hidden states", done, total))
    except KeyboardInterrupt:
        print(f"Interrupted; what is finished is kept in {out}. The same command resumes the run.", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{out}: features of {counted(len(documents), 'document')}, layers {', '.join(map(str, layers))}")
