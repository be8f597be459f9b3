"""blockdraft, through its public interface."""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from serve import Answer, Missing, Request, serve

import blockdraft

CODE = (".py", ".c", ".h")


def sources() -> str:
    """Tells two states of the package apart that carry the same version."""
    home = Path(blockdraft.__file__).parent
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(home.rglob("*.*")) if path.suffix in CODE))
    return f"{version('blockdraft')}+{found.hexdigest()[:8]}"


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    options = settings["options"]
    compiled = options["compiled"] and settings["device"] == "cpu"
    chosen = {"compile": "on"} if compiled else {}
    if "backend" in options:
        chosen["backend"] = options["backend"]
    try:
        target = blockdraft.load_target(
            settings["target"], dtype=settings["dtype"], device=settings["device"], **chosen
        )
    except ValueError as error:
        raise Missing(str(error)) from error
    drafter = blockdraft.load_drafter(options.get("drafter") or settings["drafter"], target=target)
    if compiled:
        target_reason = target.compiled is None and (target.backend_reason or "there is no reason")
        drafter_reason = getattr(drafter, "compile_reason", None)  # of one that has a network
        for part, reason in (("target", target_reason), ("drafter", drafter_reason)):
            if reason:
                raise Missing(f"the {part} is not compiled: {reason}")
    engine = blockdraft.Engine(target, drafter, 1, blockdraft.Drafting(**options.get("drafting", {})))
    torch.set_num_threads(settings["threads"])  # once more, for the engine may have chosen another number

    def decode(request: Request) -> Answer:
        params = blockdraft.SamplingParams(
            request["max_new_tokens"], stop_token_ids=tuple(request["stops"]), ignore_eos=True
        )
        began = time.perf_counter()
        [completion] = engine.generate([request["prompt"]], params)
        seconds = time.perf_counter() - began
        if completion.error is not None:
            raise FloatingPointError(completion.error)
        stats = completion.stats
        return {
            "tokens": completion.token_ids,
            "first": 1,
            "cycles": len(stats.committed),
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": seconds - stats.prefill_seconds,
        }

    about = {"blockdraft": sources(), "torch": torch.__version__, "backend": target.backend, "running": target.running}
    return about, {"decode": decode}


if __name__ == "__main__":
    serve(load)
