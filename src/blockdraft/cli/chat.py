"""`blockdraft chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import (
    CompileForward,
    Device,
    DraftWindow,
    Dtype,
    Exact,
    Quantize,
    TargetBackend,
    TargetFolder,
    Threads,
    extent,
    option,
)
from blockdraft.errors import UsageError
from blockdraft.settings import Count, settings
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_COMPILE, Drafting, SamplingParams


@settings
class ChatSettings:
    """How a chat goes.

    Attributes:
        system: System's message that the conversation begins with.
        max_new_tokens: Tokens after which an answer is cut; the context may end it before.
    """

    system: str | None = None
    max_new_tokens: Count = 1024


def chat(
    target: TargetFolder = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Drafter, as in `blockdraft generate`; none decodes plainly."),
    ] = None,
    system: Annotated[str | None, option(ChatSettings, "system")] = ChatSettings.system,
    max_new_tokens: Annotated[int, option(ChatSettings, "max_new_tokens")] = ChatSettings.max_new_tokens,
    temperature: Annotated[float, option(SamplingParams, "temperature")] = SamplingParams.temperature,
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p,
    min_p: Annotated[float, option(SamplingParams, "min_p")] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float, option(SamplingParams, "repetition_penalty")
    ] = SamplingParams.repetition_penalty,
    presence_penalty: Annotated[float, option(SamplingParams, "presence_penalty")] = SamplingParams.presence_penalty,
    frequency_penalty: Annotated[float, option(SamplingParams, "frequency_penalty")] = SamplingParams.frequency_penalty,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends an answer, which is cut before it. Repeat the option for several."),
    ] = None,
    seed: Annotated[int | None, option(SamplingParams, "seed")] = SamplingParams.seed,
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help='Tokens of a block, anchor included. "auto", the default unless there is a tree budget, lets each '
            "cycle use as many as pay, or none.",
        ),
    ] = None,
    tree_budget: Annotated[str, option(Drafting, "tree_budget", metavar="N|auto")] = str(Drafting.tree_budget),
    draft_window: DraftWindow = None,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    threads: Threads = "auto",
    compile: CompileForward = DEFAULT_COMPILE,
    quantize: Quantize = None,
    exact: Exact = False,
) -> None:
    """Talk with a model.

    Each turn reads only what is new. Guessed tokens are green, and a line below each answer says how fast it came;
    /help lists commands and keys. Where standard input or output is no terminal, each line of the input is a message,
    and the answers alone are printed.
    """
    if target is not None and drafter is None:
        raise UsageError(f"No drafter is known for {target}; add --drafter DIR, or --drafter none to decode plainly.")
    how = ChatSettings(system=system, max_new_tokens=max_new_tokens)
    params = SamplingParams(
        max_new_tokens=how.max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        seed=seed,
    )
    if block_size is None and tree_budget == "0":
        block_size = "auto"
    drafting = Drafting(extent("block_size", block_size), extent("tree_budget", tree_budget), draft_window=draft_window)

    from blockdraft.cli.display import terminal
    from blockdraft.cli.talk import Talk
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Conversation, chat_engine

    loaded = loading.load(
        target,
        dtype,
        device,
        backend,
        threads=extent("threads", threads),
        compile=compile,
        quantize=quantize,
        exact=exact,
    )
    with chat_engine(loaded, load_drafter(drafter, target=loaded), drafting) as engine:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        Talk(Conversation(engine, how.system), params, terminal() if is_terminal else None).run()
