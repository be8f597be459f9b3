"""llama.cpp: writes the models as GGUF with llama.cpp's own converter, then becomes the program that decodes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix).parent  # the environment lies beside the sources and what was built from them
PROGRAM = HOME / "build" / "llama_peer"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Run inside llama.cpp's folder. Its converter knows pre-tokenizers by a hash of what they do to a test text and refuses
# others; the benchmark passes token ids, so any entry does where the tokenizer is not on the list.
CONVERT = """
import sys
sys.path[:0] = [{source!r}, {source!r} + "/gguf-py"]
import convert_hf_to_gguf
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def pre_tokenizer(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "qwen2"
TextModel.get_vocab_base_pre = pre_tokenizer
convert_hf_to_gguf.main()
"""


class Failed(Exception):
    pass


def source() -> Path:
    [found] = HOME.glob("llama_cpp_python-*/vendor/llama.cpp")
    return found


def as_gguf(model: str, settings: dict[str, Any], weights: str | None = None, target: str | None = None) -> Path:
    """The model's GGUF file, made where there is none of these weights.

    Args:
        weights: What they are rounded to, by llama.cpp's own quantiser; None leaves them in the dtype.
        target: Of a drafter.
    """
    dtype = settings["dtype"]
    home = Path(settings.get("models") or HOME / "models")
    exact = home / f"{digest(model)}-{dtype}.gguf"
    convert = [sys.executable, "-c", CONVERT.format(source=str(source())), model, "--outtype", TYPES[dtype]]
    convert += ["--target-model-dir", target] if target else []
    _make(exact, lambda out: [*convert, "--outfile", str(out)], f"llama.cpp's converter does not take {model}")
    if weights is None:
        return exact
    rounded = home / f"{digest(model)}-{weights}.gguf"
    given = {"quantize": str(exact), "weights": weights, "threads": settings["threads"]}
    failure = f"llama.cpp's quantiser does not make {weights} of {model}"
    _make(rounded, lambda out: [str(PROGRAM), json.dumps(given | {"to": str(out)})], failure)
    return rounded


def digest(model: str) -> str:
    """Of a model's weights."""
    found = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    return found.hexdigest()[:16]


def _make(path: Path, command: Callable[[Path], list[str]], failure: str) -> None:
    """Let a command write a file, unless it is there; the command is told the name of the unfinished one."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    ended = subprocess.run(command(unfinished), stdout=sys.stderr)
    if ended.returncode or not unfinished.exists():
        unfinished.unlink(missing_ok=True)
        raise Failed(failure)
    unfinished.replace(path)


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
            given |= {"speculator": options["speculator"], "draft": path, "guesses": options.get("guesses")}
    except Failed as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    os.execv(PROGRAM, [str(PROGRAM), json.dumps(given)])


if __name__ == "__main__":
    main()
