"""`blockdraft prompts`, `data` and `hidden-states`: prompts, training data, and the target's hidden states of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from blockdraft.cli import display
from blockdraft.cli.display import exit_on_interrupt, tell
from blockdraft.cli.options import DATA, DRAFTING, MAKE, MODEL, SAMPLING, CommandSpec, Only
from blockdraft.cli.target import (
    TRAINING,
    AsJson,
    Folder,
    TargetSettings,
    TrainingTarget,
    quiet,
    read_template,
    set_template,
)
from blockdraft.errors import UsageError, counted
from blockdraft.settings import Flag, settings
from blockdraft.types import Quantize, SamplingParams
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.settings import DataSettings, HiddenStateSettings, RecordSettings
from blockdraft_train.fit.settings import PromptSettings

Records = Annotated[RecordSettings, Only("split subset", DATA)]
RecordFields = Annotated[RecordSettings, Only("split subset text_field prompt_field response_field", DATA)]
BatchSize = Annotated[DataSettings, Only("batch_size")]


def prompts(
    *,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Data as for `blockdraft data`. Without any, the target writes prompts of the kind it was trained on.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for prompts.jsonl and held-out.jsonl.")],
    model: TrainingTarget,
    settings: PromptSettings,
    records: Records,
    data_settings: BatchSize,
) -> None:
    """Choose prompts for a target to answer, in random order and without repeats, and hold some out to measure on.

    Of plain texts, beginnings are taken: of the text, and of paragraphs further on. `blockdraft data --regenerate` lets
    the target answer the prompts.
    """
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.folders import check_writable
    from blockdraft.targets import load_target_text
    from blockdraft_train.data.records import check_sources
    from blockdraft_train.fit.prompts import read_prompts, store, write_prompts

    quiet()
    records = replace(records, limit=settings.pool)
    complaints = Complaints()
    complaints.noted(check_writable, out)
    complaints.noted(check_sources, sources or (), records)
    complaints.check()
    if sources:
        chosen = read_prompts(sources, records, load_target_text(model.target or "bundled", model.revision), settings)
    else:
        target = model.load()
        with (
            display.progress("prompts") as progress,
            Engine(target, load_drafter("none", target=target), data_settings.batch_size) as engine,
        ):
            chosen = write_prompts(engine, settings, progress)
    store(out, chosen)
    part = "" if chosen.available is None else f"{len(chosen.records)} of "
    count = counted(chosen.available or len(chosen.records), "prompt")
    tell(f"{out}: {part}{count}, {len(chosen.held_out)} held out")


@settings
class DataOut:
    """Who writes the responses of training data, and where the data go."""

    out: Folder = Field(description="Folder of the data, new or of an interrupted run.")
    regenerate: bool = Field(False, description="Let the target write the responses, whatever the records hold.")
    server: Annotated[str | None, Flag(metavar="URL")] = Field(
        None,
        description="Server with OpenAI's chat completions that writes the responses, such as "
        "http://localhost:8000/v1. If it needs a key, that is read from BLOCKDRAFT_SERVER_KEY. By default our own "
        "engine writes them.",
    )
    model: Annotated[str | None, Flag(metavar="NAME")] = Field(None, description="Name of the target on the server.")
    drafter: Annotated[str | None, Flag(metavar="DIR|NAME", panel=DRAFTING)] = Field(
        None, description="Drafter of our own engine, as for `generate`; by default none."
    )
    chat_template: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        None, description="Chat template to use instead of the target's."
    )
    quantize: Annotated[Quantize | None, Flag(panel=MODEL)] = Field(
        None, description="Quantize the target that writes the responses. int4 is for CPUs, fp8 for NVIDIA GPUs."
    )

    def __post_init__(self) -> None:
        if (self.server is None) != (self.model is None):
            raise UsageError("Only one of --server and --model is given; give both, or neither.")
        if self.server and self.drafter:
            raise UsageError("--drafter is for our own engine; leave it out with --server.")


WRITTEN = DataSettings(writer="target")  # the writer is settled later; `continued` needs one


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
    options: DataOut,
    model: TrainingTarget,
    sampling: Annotated[
        SamplingParams, Only("max_new_tokens temperature top_k top_p seed", SAMPLING)
    ] = WRITTEN.sampling,
    data_settings: Annotated[
        DataSettings, Only("length template_args split_turns skip_faulty continued batch_size")
    ] = WRITTEN,
    records: Annotated[RecordSettings, Only("split subset limit text_field prompt_field response_field", DATA)],
    as_json: AsJson = False,
) -> None:
    """Turn conversations or text into the tokens and loss masks that a drafter is trained on.

    A drafter learns best from the target's own words: use --regenerate for chats and prompts, --continue for plain
    text. A target without a chat template continues whatever it is given. The same command resumes an interrupted run.
    """
    regenerate = options.regenerate or data_settings.continued is not None
    server = options.server
    if (server or options.drafter) and not regenerate:
        raise UsageError("--server and --drafter are for regenerated responses; add --regenerate or --continue N.")
    for name, value in (("adapter", model.adapter), ("quantize", options.quantize)):
        if value and (server or not regenerate):
            raise UsageError(f"--{name} is for our own engine; add --regenerate, without --server, or leave it out.")

    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.folders import check_writable
    from blockdraft.targets import load_target_text, target_fingerprint
    from blockdraft_train.data.prepare import MAX_FAULTS, Preparation, RecordReader
    from blockdraft_train.data.records import check_sources
    from blockdraft_train.data.responders import EngineResponder, Responder, ServerResponder

    quiet()
    out = options.out
    writer: Literal["text", "target", "server"] = "text" if not regenerate else "server" if server else "target"
    settings = replace(data_settings, writer=writer, author=options.model, sampling=sampling)
    # Faults of the files are reported before the target is loaded, and faults of records before its weights are.
    complaints = Complaints()
    complaints.noted(check_writable, out)
    complaints.noted(check_sources, sources, records)
    template = complaints.noted(read_template, options.chat_template) if options.chat_template else None
    complaints.check()
    text = load_target_text(model.target or "bundled", model.revision)
    set_template(text, template)
    tell("reading and checking the records ...")
    checked = RecordReader(text, sources, records, settings).check()
    target = model.load(quantize=options.quantize) if writer == "target" else None
    if target is not None:
        set_template(target, template)
        settings = replace(settings, author=target_fingerprint(target))
    preparation = Preparation(out, target or text, sources, records, settings, checked)
    reader = preparation.reader
    tell(f"{counted(preparation.total, 'record')}, {preparation.missing} to do")
    for place, fault in list(checked.faults.items())[:MAX_FAULTS]:
        tell(f"skipped: {place}: {fault}")
    if removed := preparation.writer.removed:
        tell(f"The data of {counted(len(removed), 'record')} are left out, since the sources no longer hold them.")
    if records.limit is not None and preparation.total < records.limit:
        tell(f"There are fewer than the {counted(records.limit, 'record')} of --limit; add sources to have more.")
    if reader.continued is not None:
        tell(reader.continued_note)

    responder: Responder | None = None
    if server is not None and options.model is not None:
        responder = ServerResponder(server, options.model, data_settings.batch_size, reader.encoder.template_args)
    elif target is not None:
        drafter = load_drafter(options.drafter or "none", target=target)
        responder = EngineResponder(Engine(target, drafter, data_settings.batch_size))
    arguments = {"sources": sources, "limit": records.limit, "split": records.split, "subset": records.subset}

    def interrupted() -> str:
        done = f"{preparation.writer.finished} of {preparation.total} records"
        return f"Interrupted; {done} are kept in {out}. The same command goes on."

    with exit_on_interrupt(interrupted), display.progress("records") as progress:
        manifest = preparation.run(
            responder, progress, tell, target=str(model.target or "bundled"), arguments=arguments
        )
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
    if manifest["skipped"]:
        print(f"skipped, cannot be used: {counted(manifest['skipped'], 'record')}")
    for reason, count in counts["left_out"].items():
        print(f"left out, {reason}: {counted(count, 'record')}")


def hidden_states(
    *,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder made by `blockdraft data`.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the hidden states, new or of an interrupted run.")
    ],
    model: Annotated[TargetSettings, Only(TRAINING, MODEL, dtype="--target-dtype")],
    options: HiddenStateSettings,
) -> None:
    """Store the hidden states of the target's layers for training data, so that training does not compute them.

    They take a lot of disk; the size is printed first. The same command resumes an interrupted run.
    """
    from blockdraft_train.data.documents import read_data
    from blockdraft_train.data.hidden_states import plan_hidden_states, size
    from blockdraft_train.data.target_layers import chosen_target_layers

    documents = read_data(data)
    target = model.load()
    layers = chosen_target_layers(options.target_layers, target.num_layers)
    cache = plan_hidden_states(out, target, documents, layers, options)
    names = ", ".join(map(str, layers))
    tell(
        f"{counted(len(documents), 'document')}, {sum(documents.lengths)} tokens, layers {names}: "
        f"{size(cache.need)} to write, {size(cache.free)} free"
    )
    resumable = f"Interrupted; what is finished is kept in {out}. The same command resumes the run."
    with exit_on_interrupt(resumable), display.progress("tokens") as progress:
        cache.write(lambda done, total: progress("hidden states", done, total))
    print(f"{out}: hidden states of {counted(len(documents), 'document')}, layers {names}")


PROMPTS = CommandSpec(prompts, MAKE, common="out target count held_out")
DATA_COMMAND = CommandSpec(
    data, MAKE, common="out target regenerate server model drafter limit max_new_tokens temperature"
)
HIDDEN_STATES = CommandSpec(hidden_states, MAKE, common="data out target target_layers dtype")
