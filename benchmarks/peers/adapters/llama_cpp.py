"""llama.cpp: writes the models as GGUF files, then becomes the program that decodes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockdraft_tools.export import gguf_source

HOME = Path(__file__).parents[3] / "build" / "peers" / "llama_cpp"
PROGRAM = HOME / "build" / "llama_peer"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Failed(Exception):
    pass


def as_gguf(model: str, settings: dict[str, Any], weights: str | None = None, target: str | None = None) -> Path:
    """Return the model's GGUF file, which may be the model; convert the model if there is none yet.

    Args:
        weights: What they are rounded to, by llama.cpp's own quantiser; None leaves them in the dtype.
        target: Of a drafter.

    Raises:
        Failed: It cannot be made.
    """
    if model.endswith(".gguf"):
        return Path(model)
    dtype = settings["dtype"]
    home = Path(settings.get("models") or HOME / "models")
    exact = home / f"{digest(model)}-{dtype}.gguf"
    _make(exact, lambda out: _write(model, out, TYPES[dtype], target))
    if weights is None:
        return exact
    rounded = home / f"{digest(model)}-{weights}.gguf"
    given = {"quantize": str(exact), "weights": weights, "threads": settings["threads"]}
    _make(rounded, lambda out: _round(model, given | {"to": str(out)}))
    return rounded


def _write(model: str, out: Path, weights: Any, target: str | None) -> None:
    try:
        with gguf_source(target or model) as source:
            if target is None:
                source.write_target(out, weights)
            else:
                source.write_drafter(out, source.read_drafter(model), weights)
    except ValueError as error:
        raise Failed(str(error)) from error


def _round(model: str, given: dict[str, Any]) -> None:
    if subprocess.run([str(PROGRAM), json.dumps(given)], stdout=sys.stderr).returncode:
        raise Failed(f"llama.cpp's quantiser does not make {given['weights']} of {model}")


def digest(model: str) -> str:
    """Return a hash of a model's weights."""
    found = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    return found.hexdigest()[:16]


def _make(path: Path, write: Callable[[Path], None]) -> None:
    """Let a file be written, unless it is there, under another name until it is whole."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    options = settings["options"]
    try:
        if settings["device"] != "cpu":
            raise Failed("llama.cpp was built for the CPU only")
        if options.get("draft") == "assistant" and settings["assistant"] is None:
            raise Failed("no smaller model with the target's tokens is at hand (--assistant DIR)")
        given = {"model": str(as_gguf(settings["target"], settings, options.get("weights")))}
        given |= {"type": settings.get("cache_type") or TYPES[settings["dtype"]]}  # of keys and values
        given |= {name: settings[name] for name in ("threads", "max_length")}
        if "speculator" in options:
            draft, path = options.get("draft"), None
            if draft is not None:
                needs = settings["target"] if draft == "drafter" else None
                path = str(as_gguf(settings[draft], settings, options.get("draft_weights"), needs))
            given |= {"speculator": options["speculator"], "draft": path, "draft_tokens": options.get("draft_tokens")}
    except Failed as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    os.execv(PROGRAM, [str(PROGRAM), json.dumps(given)])


if __name__ == "__main__":
    main()
