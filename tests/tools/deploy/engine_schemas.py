"""Recorded options of other engines, and checks of command lines against them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMAS = json.loads((Path(__file__).parent / "engine_schemas.json").read_text())


def check_recorded(engine: str, line: list[str], files: Mapping[str, str]) -> dict[str, Any]:
    """Check that the engine has every option and every key of the speculative configuration, which is returned."""
    known = SCHEMAS[engine]
    own = line[line.index("-m") + 2 :] if line[0] == "python" else line
    assert [word for word in own if word.startswith("-") and word not in known["flags"]] == []
    said: dict[str, Any] = {}
    if engine == "vLLM" and "--speculative-config" in line:  # the speculators format needs none
        said = json.loads(line[line.index("--speculative-config") + 1])
        assert set(said) <= set(known["fields"]) and said["method"] in known["methods"]
        assert type(said["num_speculative_tokens"]) is int
    if engine == "SGLang":
        said = {word: line[place + 1] for place, word in enumerate(line) if word.startswith("--speculative")}
        assert said["--speculative-algorithm"] in known["algorithms"]
        steps = said.get("--speculative-num-steps")
        assert steps is None or int(said["--speculative-num-draft-tokens"]) == int(steps) + 1
    if engine == "TensorRT-LLM":
        [content] = files.values()
        assert line[line.index("--config") + 1] in files
        whole = json.loads(content)
        assert set(whole) <= set(known["keys"])
        said = whole["speculative_config"]
        assert set(said) <= set(known["fields"][said["decoding_type"]]) and type(said["max_draft_len"]) is int
    if engine == "llama.cpp":
        assert line[line.index("--spec-type") + 1] in known["speculators"]
    return said
