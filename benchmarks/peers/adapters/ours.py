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


def sources() -> str:
    """Tells two states of the package apart that carry the same version."""
    home = Path(blockdraft.__file__).parent
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(home.rglob("*.py"))))
    return f"{version('blockdraft')}+{found.hexdigest()[:8]}"


def load(settings: Request) -> tuple[dict[str, str], dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    options = settings["options"]
    chosen = {}
    if "backend" in options:
        chosen = {"backend": options["backend"]}
    try:
        target = blockdraft.load_target(
            settings["target"], dtype=settings["dtype"], device=settings["device"], **chosen
        )
    except ValueError as error:
        raise Missing(str(error)) from error
    drafter = blockdraft.load_drafter(options.get("drafter") or settings["drafter"], target=target)
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

    backend = target.backend
    about = {"blockdraft": sources(), "torch": torch.__version__, "backend": backend}
    return about, {"decode": decode}


if __name__ == "__main__":
    serve(load)
