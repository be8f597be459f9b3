"""`blockdraft chat`: a conversation in the terminal."""

from __future__ import annotations

import sys

from pydantic import Field

from blockdraft.cli.display import terminal
from blockdraft.cli.target import (
    Decoded,
    DrafterSettings,
    DraftNetwork,
    HowFar,
    Sampling,
    auto_by_default,
    drafter_or_lookup,
    tell_unused,
)
from blockdraft.machine import uncollected
from blockdraft.settings import settings
from blockdraft.types import SamplingParams

CHAT = SamplingParams(max_new_tokens=1024)


@settings
class ChatSettings:
    """Settings of a chat."""

    system: str | None = Field(None, description="System message at the beginning of the conversation.")


def chat(
    *,
    run: Decoded,
    drafter: DrafterSettings,
    network: DraftNetwork,
    how: ChatSettings,
    sampling: Sampling = CHAT,
    drafting: HowFar,
) -> None:
    """Talk with a model.

    Accepted draft tokens are green, and a line below each answer shows its speed. Each turn computes only what is new.
    /help lists commands and keys. If standard input or output is not a terminal, each line of the input is a message,
    and only the answers are printed.
    """
    place = drafter_or_lookup(run.target, drafter.drafter)
    tell_unused(sampling, [sampling.temperature], drafting.sampled)

    with uncollected():
        from blockdraft.cli.talk import Talk
        from blockdraft.drafters import load_drafter
        from blockdraft.engine import Conversation, chat_engine

        target = run.load_for(place, network)
        loaded = load_drafter(place, target=target, **network.options())
    with chat_engine(target, loaded, auto_by_default(drafting)) as engine:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        Talk(Conversation(engine, how.system), sampling, terminal() if is_terminal else None).run()
