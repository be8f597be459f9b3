"""blockdraft, through its public interface.

The settings or the options may also hold "quantize", and the options "ways": ways to decode with one target by name,
each with options of its own; a request then names one as "way". With "accept" in a request (counts, used cyclically)
that many of each step's draft tokens are right, whatever was drafted.
"""

from __future__ import annotations

import hashlib
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from serve import Answer, Missing, Request, serve

import blockdraft

sys.path.append(str(Path(__file__).parents[3]))  # an adapter is started as a script

from benchmarks.gpu.measure import Forced
from benchmarks.harness.models import why_uncompiled

CODE = (".py", ".c", ".h")


def sources() -> str:
    """Return the version with a hash of the sources."""
    home = Path(blockdraft.__file__).parent
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(home.rglob("*.*")) if path.suffix in CODE))
    return f"{version('blockdraft')}+{found.hexdigest()[:8]}"


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    options = settings["options"]
    ways: dict[str, dict[str, Any]] = options.get("ways") or {"": options}
    compiled = options["compiled"] and settings["device"] == "cpu"
    chosen = {"compile": "on"} if compiled else {}
    chosen |= {name: options[name] for name in ("backend",) if name in options}
    chosen |= {name: settings.get(name) for name in ("dtype", "device")}
    chosen["quantize"] = options.get("quantize", settings.get("quantize"))
    try:
        target = blockdraft.load_target(settings["target"], **chosen)
    except ValueError as error:
        raise Missing(str(error)) from error

    def drafter_of(way: dict[str, Any]) -> str:
        named = str(way.get("drafter") or settings["drafter"])
        return named + settings["drafter"] if named.endswith("+") else named

    named = {name: drafter_of(way) for name, way in ways.items()}
    drafters = {each: blockdraft.load_drafter(each, target=target) for each in set(named.values())}
    if compiled and (reason := why_uncompiled(target, *drafters.values())):
        raise Missing(reason)
    drafting = {
        name: blockdraft.Drafting(**{"block_size": None} | way.get("drafting", {})) for name, way in ways.items()
    }
    engines = {name: blockdraft.Engine(target, drafters[named[name]], 1, drafting[name]) for name in ways}
    torch.set_num_threads(settings["threads"])  # once more, for the engine may have chosen another number
    plain: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def forced(request: Request, params: blockdraft.SamplingParams) -> blockdraft.Engine:
        """Return an engine whose draft tokens are right as often as asked; right ones are those of plain decoding."""
        name, prompt = request.get("way", ""), request["prompt"]
        key = (tuple(prompt), request["max_new_tokens"])
        if key not in plain:
            alone = blockdraft.Engine(target, blockdraft.load_drafter("none", target=target))
            plain[key] = alone.generate([prompt], params)[0].token_ids
        drafter: Any = Forced(drafters[named[name]], len(prompt), plain[key], request["accept"], target.vocab_size)
        return blockdraft.Engine(target, drafter, 1, drafting[name])

    def decode(request: Request) -> Answer:
        way, stops = request.get("way", ""), tuple(request["stops"])
        params = blockdraft.SamplingParams(request["max_new_tokens"], stop_token_ids=stops, ignore_eos=True)
        replaced = named[way] != "none" and request.get("accept")
        engine = forced(request, params) if replaced else engines[way]
        began = time.perf_counter()
        [completion] = engine.generate([request["prompt"]], params)
        seconds = time.perf_counter() - began
        if completion.error is not None:
            raise FloatingPointError(completion.error)
        stats = completion.stats
        return {
            "tokens": completion.token_ids,
            "first": 1,
            "steps": len(stats.committed),
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": seconds - stats.prefill_seconds,
        }

    @cache
    def wide(way: str) -> blockdraft.Engine:
        """Return the engine of a method, with a batch as large as the number of prompts asked at once."""
        return blockdraft.Engine(target, drafters[named[way]], settings["at_once"], drafting[way])

    def decode_many(request: Request) -> Answer:
        stops = tuple(request["stops"])
        params = blockdraft.SamplingParams(request["max_new_tokens"], stop_token_ids=stops, ignore_eos=True)
        engine = wide(request.get("way", ""))
        began = time.perf_counter()
        completions = engine.generate(request["prompts"], params)
        seconds = time.perf_counter() - began
        return {"tokens": sum(len(each.token_ids) for each in completions), "seconds": seconds}

    about = {"blockdraft": sources(), "torch": torch.__version__, "backend": target.backend, "running": target.running}
    return about, {"decode": decode, "decode_many": decode_many}


if __name__ == "__main__":
    serve(load)
