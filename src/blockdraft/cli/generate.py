"""`blockdraft generate`: answers a prompt, or a file of them."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import consoles
from blockdraft.cli.options import (
    DrafterOptions,
    DrafterPlace,
    SamplingOptions,
    TargetOptions,
    drafter_or_lookup,
    option,
)
from blockdraft.errors import UsageError
from blockdraft.evaluation.settings import Settings
from blockdraft.machine import PeakMemory, uncollected
from blockdraft.timing import telling
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine import Chunk, Engine


def generate(
    *,
    run: TargetOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt to answer; without one, or with -, it is read from standard input.")
    ] = None,
    drafter: DrafterPlace = None,
    model: DrafterOptions,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    sampling: SamplingOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='File of prompts, lines of {"prompt": "text"} or {"turns": ["text", ...]}. Each answer is printed as '
            "a JSON object on a line, as soon as it is done. Prompt i, from 0 on, has the seed + i.",
        ),
    ] = None,
    batch_size: Annotated[int | None, option(Settings, "batch_size")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode without the drafter as well, and compare speed and tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of text.")] = False,
) -> None:
    """Answer a prompt.

    A terminal shows the answer as it comes, with guessed tokens in green. A pipe gets the answer alone.
    """
    drafter = drafter_or_lookup(run.target, drafter)
    params = sampling.params(max_new_tokens)
    if params.seed is None:  # all runs of a comparison share one
        params = replace(params, seed=secrets.randbits(32))
    drafting = sampling.drafting
    if prompts is not None and (prompt is not None or compare):
        other = "--compare" if compare else "a prompt"
        raise UsageError(f"--prompts {prompts} and {other} do not go together; leave one of them away.")
    if compare and drafting.sampled and params.temperature:
        raise UsageError(
            "--compare and --sampled do not go together at a temperature: their tokens differ. To compare speeds, use "
            "blockdraft bench --methods none,chain,chain-sampled --temperature T."
        )
    if batch_size is not None:
        Settings(batch_size=batch_size)
    texts = read_prompts(prompts) if prompts else [read_prompt(prompt)]

    with uncollected():
        from blockdraft.cli import display
        from blockdraft.cli.display import compare_with_plain, slower_note
        from blockdraft.drafters import load_drafter
        from blockdraft.engine import Engine

        peak = PeakMemory() if as_json else None  # on top of what the imports take
        loaded = run.load(drafter)
        if batch_size is None and not prompts:
            batch_size = 1  # one prompt needs room for one
        rows = {} if batch_size is None else {"max_batch_size": batch_size}
        loaded_drafter = load_drafter(drafter, target=loaded, **model.options())
        engine = Engine(loaded, loaded_drafter, drafting=drafting, **rows)

    if prompts:
        _answer_all(engine, texts, params)
        _tell(display.ahead_note(loaded_drafter))
        return
    [text] = texts
    if sys.stdout.isatty() and not as_json:
        console, measured = consoles.terminal(), None
        stats = display.stream_answer(console, engine, text, params)
        if compare:
            with display.notice(console, "measuring ..."):
                measured = compare_with_plain(engine, text, params)
            display.show_comparison(console, measured)
        _tell(slower_note(engine, stats, measured))
        _tell(display.ahead_note(loaded_drafter))
        return
    with telling(_tell, "Answering with and without the drafter" if compare else "Answering", at_once=False):
        measured = compare_with_plain(engine, text, params) if compare else None
        completion = measured.drafted if measured else engine.generate([text], params)[0].checked()
    if peak is not None:
        planned = engine.memory.of_one(engine.request(text, params).slots)
        memory = {**planned, "planned": sum(planned.values()), "measured": peak.bytes()}
        print(json.dumps({**display.as_dict(completion, measured, engine), "memory": memory}))
    else:
        print(completion.text)
        if measured:
            display.show_comparison(consoles.plain(), measured)
    sys.stdout.flush()  # here a closed pipe still ends the command quietly
    _tell(slower_note(engine, completion.stats, measured))
    _tell(display.ahead_note(loaded_drafter))


def _tell(text: str | None) -> None:
    if text is not None:
        print(text, file=sys.stderr, flush=True)


def _answer_all(engine: Engine, prompts: list[str], params: SamplingParams) -> None:
    """Print answers as JSON lines, in the order in which they end."""
    from blockdraft.cli.display import as_dict

    assert params.seed is not None
    ended: SimpleQueue[int] = SimpleQueue()

    def tell(number: int, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            ended.put(number)

    with engine:
        requests = [
            engine.submit(prompt, replace(params, seed=params.seed + number), partial(tell, number))
            for number, prompt in enumerate(prompts)
        ]
        for _ in requests:
            number = ended.get()
            completion = requests[number].result()
            answer = {"index": number, "prompt": prompts[number], **as_dict(completion, None, engine)}
            print(json.dumps(answer | ({"error": completion.error} if completion.error else {})), flush=True)


def read_prompts(path: Path) -> list[str]:
    from blockdraft.evaluation.prompts import read_prompt_sets

    [found] = read_prompt_sets([path])
    return list(found.prompts)


def read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        text = str(prompt)
    elif prompt is None and sys.stdin.isatty():
        raise UsageError("There is no prompt; give one as an argument or on standard input.")
    else:
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not {error.encoding} text ({error.reason}).") from error
    if not text.strip():
        raise UsageError("The prompt is empty; give at least one token of text.")
    return checked_text(text)


def checked_text(text: str) -> str:
    """The text itself. Raises a UsageError for invalid bytes of the command line, which arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The prompt is not valid UTF-8 text.") from error
    return text
