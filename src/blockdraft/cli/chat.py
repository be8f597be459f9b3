"""`blockdraft chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

from blockdraft.cli import consoles
from blockdraft.cli.options import (
    DrafterOptions,
    DrafterPlace,
    SamplingOptions,
    TargetOptions,
    drafter_or_lookup,
    option,
)
from blockdraft.machine import uncollected
from blockdraft.settings import Count, settings


@settings
class ChatSettings:
    """Settings of a chat.

    Attributes:
        system: System message at the beginning of the conversation.
        max_new_tokens: Most tokens of an answer; a full context ends it earlier.
    """

    system: str | None = None
    max_new_tokens: Count = 1024


def chat(
    *,
    run: TargetOptions,
    drafter: DrafterPlace = None,
    model: DrafterOptions,
    system: Annotated[str | None, option(ChatSettings, "system")] = ChatSettings.system,
    max_new_tokens: Annotated[int, option(ChatSettings, "max_new_tokens")] = ChatSettings.max_new_tokens,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model.

    Guessed tokens are green, and a line below each answer shows its speed. Each turn reads only what is new. /help
    lists commands and keys. If standard input or output is not a terminal, each line of the input is a message, and
    only the answers are printed.
    """
    drafter = drafter_or_lookup(run.target, drafter)
    how = ChatSettings(system=system, max_new_tokens=max_new_tokens)
    params, drafting = sampling.params(how.max_new_tokens), sampling.drafting

    with uncollected():
        from blockdraft.cli.talk import Talk
        from blockdraft.drafters import load_drafter
        from blockdraft.engine import Conversation, chat_engine

        loaded = run.load(drafter)
        loaded_drafter = load_drafter(drafter, target=loaded, **model.options())
    with chat_engine(loaded, loaded_drafter, drafting) as engine:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        Talk(Conversation(engine, how.system), params, consoles.terminal() if is_terminal else None).run()
