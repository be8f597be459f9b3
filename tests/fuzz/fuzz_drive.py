"""Submits the requests of a case to an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fuzz_cases import Ask

from blockdraft import Completion, Engine
from blockdraft.engine import Chunk, Request

PATIENCE = 120.0  # seconds that a completion may take


def answers(engine: Engine, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> list[Completion]:
    """Return the completions of requests. All run at once, except those that wait for another one.

    Cancellations come in between. The completion of a stream is joined from its chunks.
    """
    requests: list[Request] = []
    streams: list[list[Chunk]] = []
    for ask, prompt in zip(asks, prompts, strict=True):
        if ask.after is not None:
            requests[ask.after].result(PATIENCE)
        streams.append([])
        listener = streams[-1].append if ask.stream else None
        more = {"trace": ask.stream, "instruction_tokens": ask.instructions, "urgent": ask.urgent}
        requests.append(engine.submit(prompt, ask.params, listener, ask.bounds, **more))
        if ask.cancel:
            while ask.stream and not streams[-1]:  # once it has begun
                time.sleep(0.001)
            requests[-1].cancel()
    completions = [request.result(PATIENCE) for request in requests]
    return [
        _joined(chunks, completion) if ask.stream else completion
        for ask, chunks, completion in zip(asks, streams, completions, strict=True)
    ]


def _joined(chunks: Sequence[Chunk], whole: Completion) -> Completion:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    drafted = [from_draft for chunk in chunks for from_draft in chunk.drafted]
    text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
    assert last.finish_reason is not None and (text, tokens, drafted) == (whole.text, whole.token_ids, whole.drafted)
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()] if last.logprobs is not None else None
    steps = [chunk.step for chunk in chunks if chunk.step is not None]
    assert len(steps) == len(whole.stats.committed)
    assert all(
        chunk.step.path[0] == 0 and len(chunk.step.path) >= len(chunk.token_ids) for chunk in chunks if chunk.step
    )
    end = last.finish_reason, drafted, last.stats, whole.prompt_tokens, last.failure, logprobs, whole.prompt_logprobs
    return Completion(text, tokens, *end)
