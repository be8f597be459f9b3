"""How the requests of a case reach an engine: by `submit`, whatever order they come in, or by `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuzz_cases import Ask

from blockdraft import Completion, Engine

PATIENCE = 120.0  # seconds that an answer may take


def answers(engine: Engine, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> list[Completion]:
    """Completions of requests whose prompts are known."""
    if hasattr(engine, "submit"):
        return _submitted(engine, asks, prompts)
    found: dict[int, Completion] = {}
    while len(found) < len(asks):
        ready = [i for i, ask in enumerate(asks) if i not in found and (ask.after is None or ask.after in found)]
        for i in [i for i in ready if asks[i].stream]:
            found[i] = _streamed(engine, asks[i], prompts[i])
        ready = [i for i in ready if i not in found]
        if ready:
            completions = engine.generate([prompts[i] for i in ready], [asks[i].params for i in ready])
            found |= dict(zip(ready, completions, strict=True))
    return [found[i] for i in range(len(asks))]


def _submitted(engine: Any, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> list[Completion]:
    """All at once, but for those that wait for another one; cancellations come in between."""
    handles: list[Any] = []
    for ask, prompt in zip(asks, prompts, strict=True):
        if ask.after is not None:
            handles[ask.after].result(PATIENCE)
        handles.append(engine.submit(prompt, ask.params))
        if ask.cancel:
            if ask.stream:  # once it has begun
                next(iter(handles[-1]), None)
            handles[-1].cancel()
    return [handle.result(PATIENCE) for handle in handles]


def _streamed(engine: Engine, ask: Ask, prompt: list[int]) -> Completion:
    chunks = list(engine.stream(prompt, ask.params))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    drafted = [guessed for chunk in chunks for guessed in chunk.drafted]
    text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
    assert last.finish_reason is not None
    return Completion(text, tokens, last.finish_reason, drafted, last.stats, len(prompt), last.error)


def close(engine: Any) -> None:
    if hasattr(engine, "close"):
        engine.close()
