"""`blockdraft generate`: answers a prompt, or a file of prompts."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from blockdraft.cli.display import standard, tell
from blockdraft.cli.options import DATA, OUTPUT
from blockdraft.cli.target import (
    AsJson,
    DecodingTarget,
    DrafterSettings,
    DraftingOptions,
    Sampling,
    exclude,
    tell_unused,
)
from blockdraft.errors import UsageError
from blockdraft.machine import PeakMemory, uncollected
from blockdraft.settings import Count, Flag, settings
from blockdraft.timing import telling
from blockdraft.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine import Chunk, Engine

PromptArgument = Annotated[
    str | None, typer.Argument(help="Prompt; without one, or with -, it is read from standard input.")
]


@settings
class GenerateSettings:
    """What `blockdraft generate` answers and prints."""

    prompts: Annotated[Path | None, Flag(metavar="FILE", panel=DATA)] = Field(
        None,
        description='File of prompts, one {"prompt": "text"} or {"turns": ["text", ...]} per line. Each answer is '
        "printed as one line of JSON as soon as it is done. Prompt i, from 0 on, has the seed + i.",
    )
    suffix: Annotated[str | None, Flag(metavar="TEXT", panel=DATA)] = Field(
        None,
        description="Text behind the answer: a model of code writes what stands between the prompt and it. No chat "
        "template is used.",
    )
    batch_size: Count | None = Field(
        None, description="Number of prompts decoded together; by default as many as the engine has room for."
    )
    compare: Annotated[bool, Flag(panel=OUTPUT)] = Field(
        False, description="Decode without the drafter as well, and compare speed and tokens."
    )


def generate(
    *,
    model: DecodingTarget,
    prompt: PromptArgument = None,
    drafter: DrafterSettings,
    sampling: Sampling,
    drafting: DraftingOptions,
    options: GenerateSettings,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt.

    A terminal shows the answer as it comes, with accepted draft tokens in green. A pipe gets the answer alone.
    """
    # All runs of a comparison share one seed.
    params = replace(sampling, seed=secrets.randbits(32)) if sampling.seed is None else sampling
    tell_unused(params, [params.temperature], drafting.sampled)
    if options.prompts is not None:
        exclude(
            f"--prompts {options.prompts}",
            ("--compare", options.compare),
            ("a prompt", prompt),
            ("--suffix", options.suffix),
        )
    if options.compare and drafting.sampled and params.temperature:
        raise UsageError(
            "--compare and --sampled exclude each other at a temperature, since their tokens differ. To compare "
            "speeds, use blockdraft bench --methods none,chain,chain-sampled --temperature T."
        )
    prompts: Sequence[Prompt] = (
        read_prompts(options.prompts)
        if options.prompts
        else [read_prompt(prompt, may_be_empty=options.suffix is not None)]
    )

    with uncollected():
        from blockdraft.cli import answers
        from blockdraft.engine import Engine, infill_params, infill_prompt

        peak = PeakMemory() if as_json else None  # on top of what the imports take
        size: dict[str, Any] = {}
        if options.batch_size or not options.prompts:
            size["max_batch_size"] = options.batch_size or 1
        target = model.load_for(drafter.drafter, drafter.draft_vocab)
        loaded = drafter.load(target)
        engine = Engine(target, loaded, drafting=drafting, **size)

    if options.prompts:
        _answer_all(engine, prompts, params)
        return
    [text] = prompts
    if options.suffix is not None:
        room = target.max_context - params.max_new_tokens
        text = infill_prompt(target.tokenizer, str(text), options.suffix, max_tokens=room)
        params = infill_params(target.tokenizer, params)
    console, shows_tokens = standard(), sys.stdout.isatty() and not as_json
    if shows_tokens:
        answers.stream_answer(console, engine, text, params)
    stage = "Answering with and without the drafter" if options.compare else "Answering"
    with telling(tell, stage, at_once=False):
        comparison = answers.compare_with_plain(engine, text, params) if options.compare else None
        if not shows_tokens:
            completion = comparison.drafted if comparison else engine.generate([text], params)[0].checked()
    if peak is not None:
        planned = engine.memory.of_one(engine.request(text, params).slots)
        memory = {**planned, "planned": sum(planned.values()), "measured": peak.bytes()}
        print(json.dumps({**answers.as_dict(completion, comparison, engine), "memory": memory}))
    else:
        if not shows_tokens:
            print(completion.text)
        if comparison:
            answers.show_comparison(console, comparison)
    sys.stdout.flush()  # a closed pipe still ends the command quietly here
    tell(answers.slower_note(engine, comparison) if comparison else None)


def _answer_all(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Print answers as JSON lines, in the order in which they end."""
    from blockdraft.cli.answers import as_dict

    assert params.seed is not None
    ended: SimpleQueue[int] = SimpleQueue()

    def receive(number: int, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            ended.put(number)

    with engine:
        requests = [
            engine.submit(prompt, replace(params, seed=params.seed + number), partial(receive, number))
            for number, prompt in enumerate(prompts)
        ]
        for _ in requests:
            number = ended.get()
            completion = requests[number].result()
            answer = {"index": number, "prompt": prompts[number], **as_dict(completion, None, engine)}
            print(json.dumps(answer | ({"error": completion.error} if completion.error else {})), flush=True)


def read_prompts(path: Path) -> list[str]:
    from blockdraft.prompt_sets import read_prompt_sets

    [prompts] = read_prompt_sets([path])
    return list(prompts.prompts)


def read_prompt(prompt: str | None, may_be_empty: bool = False) -> str:
    """Return the prompt of the command line, or that of standard input if it is None or "-"."""
    if prompt not in (None, "-"):
        text = str(prompt)
    elif prompt is None and sys.stdin.isatty():
        raise UsageError("There is no prompt; give one as an argument or on standard input.")
    else:
        try:
            text = sys.stdin.read().removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not {error.encoding} text ({error.reason}).") from error
    if not text.strip() and not may_be_empty:
        raise UsageError("The prompt is empty; give at least one token of text.")
    return checked_text(text)


def checked_text(text: str) -> str:
    """Return the text. Raise a UsageError for invalid bytes of the command line, which come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The prompt is not valid UTF-8 text.") from error
    return text
