"""The engine without a server, in a process of its own.

It runs the same closed loop through `Engine.submit`, and computes the responses that every server must give: each is
decoded plainly and alone.

The argument is JSON, {"target", "drafter", "dtype", "batch", "prefix_tokens", "threads"}; the protocol is that of the
peers. `load` is that of `benchmarks.server.client`, with {"requests": [{"messages", "max_tokens"}]} for bodies; `known`
takes {"requests"} and returns the answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

import torch
import transformers
from benchmarks.harness.models import why_uncompiled
from benchmarks.peers.adapters.serve import Missing, serve
from benchmarks.server.client import Heard

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine import Chunk, loops

PATIENCE = 600.0  # seconds that an answer may take


def closed_loop(
    engine: Engine, requests: Sequence[dict[str, Any]], streams: int, seconds: float, first: int
) -> list[Heard]:
    """Put the engine under load, as `benchmarks.server.client.closed_loop` a server."""
    began, ended, begun = time.monotonic(), SimpleQueue[Heard](), list[Heard]()

    def begin() -> None:
        heard = Heard((first + len(begun)) % len(requests), time.monotonic() - began)
        begun.append(heard)

        def hear(chunk: Chunk) -> None:
            heard.times.append((time.monotonic() - began, float(len(chunk.token_ids))))
            heard.text += chunk.text
            heard.tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                heard.finish = chunk.finish_reason
                heard.problem = "an error" if chunk.finish_reason == "error" else ""
                ended.put(heard)

        given = requests[heard.index]
        request = engine.submit(given["messages"], SamplingParams(given["max_tokens"]), hear)
        heard.prompt_tokens = len(request.prompt)

    for _ in range(streams):
        begin()
    done = 0
    while done < len(begun):
        ended.get(timeout=PATIENCE)
        done += 1
        if time.monotonic() - began < seconds:
            begin()
    return begun


def load(settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    target = load_target(settings["target"], dtype=settings["dtype"], compile="on", threads=settings["threads"])
    drafter = load_drafter(settings["drafter"], target=target)
    if reason := why_uncompiled(target, drafter):
        raise Missing(reason)
    how = {"max_batch_size": settings["batch"], "prefix_tokens": settings["prefix_tokens"]}
    engine = Engine(target, drafter, drafting=Drafting(block_size="auto"), **how)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"heard": [asdict(each) for each in closed_loop(engine, **request)]}

    def known(request: dict[str, Any]) -> dict[str, Any]:
        found = list[dict[str, Any]]()
        with Engine(target, load_drafter("none", target=target), 1) as plain:
            for each in request["requests"]:
                [said] = plain.generate([each["messages"]], SamplingParams(each["max_tokens"]))
                ids = said.token_ids
                found.append({"text": said.text, "finish": said.finish_reason, "tokens": len(ids), "loops": loops(ids)})
        return {"known": found}

    return {"running": target.running}, {"load": answer, "known": known}


if __name__ == "__main__":
    serve(load)
