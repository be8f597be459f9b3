"""llama.cpp: writes the models as GGUF with llama.cpp's own converter, then becomes the program that decodes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

HOME = Path(sys.prefix).parent  # the environment lies beside the sources and what was built from them
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


def as_gguf(model: str, dtype: str, target: str | None = None) -> Path:
    """The model's GGUF file, converted where there is none of these weights."""
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(model).glob("*.safetensors"))))
    path = HOME / "models" / f"{weights.hexdigest()[:16]}-{dtype}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        command = [sys.executable, "-c", CONVERT.format(source=str(source())), model, "--outfile", str(unfinished)]
        command += ["--outtype", TYPES[dtype]] + (["--target-model-dir", target] if target else [])
        ended = subprocess.run(command, stdout=sys.stderr)
        if ended.returncode or not unfinished.exists():
            raise Failed(f"llama.cpp's converter does not take {model}")
        unfinished.replace(path)
    return path


def main() -> None:
    settings = json.loads(sys.argv[1])
    dtype, options = settings["dtype"], settings["options"]
    try:
        if settings["device"] != "cpu":
            raise Failed("llama.cpp was built for the CPU only")
        if options.get("draft") == "assistant" and settings["assistant"] is None:
            raise Failed("no smaller model with the target's tokens is at hand (--assistant DIR)")
        given = {"model": str(as_gguf(settings["target"], dtype)), "type": TYPES[dtype]}  # of keys and values as well
        given |= {name: settings[name] for name in ("threads", "max_length")}
        if "speculator" in options:
            draft, path = options.get("draft"), None
            if draft is not None:
                needs = settings["target"] if draft == "drafter" else None
                path = str(as_gguf(settings[draft], dtype, needs))
            given |= {"speculator": options["speculator"], "draft": path, "guesses": options.get("guesses")}
    except Failed as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    program = str(HOME / "build" / "llama_peer")
    os.execv(program, [program, json.dumps(given)])


if __name__ == "__main__":
    main()
