"""Commands for other engines use only options that the engines have, for every kind of drafter in every layout."""

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from blockdraft.targets import Target, load_target
from blockdraft_tools.export import convert, export_gguf, format_for
from blockdraft_tools.inspect import inspect

SCHEMAS = json.loads((Path(__file__).parent / "engine_schemas.json").read_text())


def check_recorded(engine: str, line: list[str], files: Mapping[str, str]) -> dict[str, Any]:
    """Check a command against the engine's recorded options, and return its speculative configuration."""
    known = SCHEMAS[engine]
    options = line[line.index("-m") + 2 :] if line[0] == "python" else line
    assert [word for word in options if word.startswith("-") and word not in known["flags"]] == []
    config: dict[str, Any] = {}
    if engine == "vLLM" and "--speculative-config" in line:  # the speculators format needs none
        config = json.loads(line[line.index("--speculative-config") + 1])
        assert set(config) <= set(known["fields"]) and config["method"] in known["methods"]
        assert type(config["num_speculative_tokens"]) is int
    if engine == "SGLang":
        config = {word: line[i + 1] for i, word in enumerate(line) if word.startswith("--speculative")}
        assert config["--speculative-algorithm"] in known["algorithms"]
        steps = config.get("--speculative-num-steps")
        assert steps is None or int(config["--speculative-num-draft-tokens"]) == int(steps) + 1
    if engine == "TensorRT-LLM":
        [content] = files.values()
        assert line[line.index("--config") + 1] in files
        assert set(json.loads(content)) <= set(known["keys"])
        config = json.loads(content)["speculative_config"]
        assert set(config) <= set(known["fields"][config["decoding_type"]]) and type(config["max_draft_len"]) is int
    if engine == "llama.cpp":
        assert line[line.index("--spec-type") + 1] in known["speculators"]
    return config


# Layouts of each kind, and the engines that read it there.
KINDS: dict[str, dict[str, set[str]]] = {
    "drafter": {
        "zlab": {"vLLM", "SGLang", "TensorRT-LLM"},
        "speculators": {"vLLM"},
        "gguf": {"llama.cpp"},
    },
    "dflash2": {"zlab": {"vLLM"}, "gguf": {"llama.cpp"}},
    "dspark": {"zlab": set(), "speculators": {"vLLM"}, "gguf": {"llama.cpp"}},
    "eagle3": {
        "eagle3": {"vLLM", "SGLang", "TensorRT-LLM"},
        "eagle3_speculators": {"vLLM"},
        "gguf": {"llama.cpp"},
    },
    "medusa": {"medusa": set()},
    "mtp": {"mtp": set(), "mtp_speculators": set()},
}
OWN = {"drafter": "zlab", "dflash2": "zlab", "dspark": "zlab", "eagle3": "eagle3", "medusa": "medusa", "mtp": "mtp"}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture(scope="module")
def drafters(
    tiny_drafter_dir: Path,
    tiny_dflash2_dir: Path,
    tiny_dspark_dir: Path,
    eagle3_of_three_target_layers: Path,
    tiny_medusa_dir: Path,
    tiny_mtp_dir: Path,
) -> dict[str, Path]:
    found = (
        tiny_drafter_dir,
        tiny_dflash2_dir,
        tiny_dspark_dir,
        eagle3_of_three_target_layers,
        tiny_medusa_dir,
        tiny_mtp_dir,
    )
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture
def written(
    drafters: dict[str, Path], target: Target, tiny_target_dir: Path, tmp_path: Path
) -> Callable[[str, str], tuple[str, str]]:
    """A drafter in a layout, and its target."""

    def write(kind: str, layout: str) -> tuple[str, str]:
        folder, out = drafters[kind], tmp_path / layout
        if layout == OWN[kind]:
            return str(folder), str(tiny_target_dir)
        if layout == "gguf":
            done = export_gguf(folder, out, tiny_target_dir, "f32")
            return str(done.drafter), str(done.target)
        convert(folder, out, format_for(layout, target, str(tiny_target_dir)), target)
        return str(out), str(tiny_target_dir)

    return write


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=pytest.mark.slow if place else ())
        for kind in KINDS
        for place, layout in enumerate(KINDS[kind])
    ],
)
def test_commands_use_options_of_the_engines(
    written: Callable[[str, str], tuple[str, str]], kind: str, layout: str
) -> None:
    drafter, target = written(kind, layout)
    found = inspect(drafter, target)
    assert (found.layout, found.what) == (layout, "drafter") and all(check.holds is not False for check in found.fits)
    lines = {engine: start for engine, start in found.starts.items() if engine != "blockdraft"}
    assert {engine for engine, start in lines.items() if start.line is not None} == KINDS[kind][layout]
    assert list(lines) == ["vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "OpenVINO GenAI"]
    draft_tokens = found.conventions["draft_tokens"]
    for engine, start in lines.items():
        if start.line is None:
            assert start.reason and not start.files
            assert engine != "OpenVINO GenAI" or (start.remedy is not None) == (kind == "drafter")
            continue
        options = check_recorded(engine, shlex.split(start.line), start.files)
        counts = {"vLLM": "num_speculative_tokens", "TensorRT-LLM": "max_draft_len"}
        if engine in counts and options:
            assert options[counts[engine]] == draft_tokens
            assert drafter in options.values()
        if engine == "SGLang":
            assert options["--speculative-num-draft-tokens"] == str(draft_tokens + 1)


def test_reasons_for_kinds_that_no_engine_runs(drafters: dict[str, Path], tiny_target_dir: Path) -> None:
    for kind, engine, reason in (
        ("medusa", "SGLang", "it runs no Medusa heads"),
        ("medusa", "vLLM", "it reads Medusa's heads in a layout of its own"),
        ("mtp", "TensorRT-LLM", "it runs MTP heads that lie in the target's own"),
        ("mtp", "vLLM", "it runs MTP heads that lie in the target's own"),
        ("dflash2", "TensorRT-LLM", "no command for DFlash2DraftModel is known"),
        ("dspark", "vLLM", "it reads no DSparkDraftModel in this format"),
    ):
        start = inspect(drafters[kind], tiny_target_dir).starts[engine]
        assert start.line is None and reason in str(start.reason)
    assert "--format speculators" in str(start.remedy)


def test_shell_command_writes_the_configuration_file(
    drafters: dict[str, Path], tiny_target_dir: Path, tmp_path: Path
) -> None:
    start = inspect(drafters["drafter"], tiny_target_dir).starts["TensorRT-LLM"]
    script = f'trtllm-serve() {{ echo "$@"; }}\n{start.typed}'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == shlex.split(str(start.line))[1:]
    assert json.loads((tmp_path / "trtllm.yaml").read_text()) == json.loads(start.files["trtllm.yaml"])


def test_eagle3_with_the_usual_target_layers_names_none(drafters: dict[str, Path], tiny_target_dir: Path) -> None:
    start = inspect(drafters["eagle3"], tiny_target_dir).starts["TensorRT-LLM"]
    assert '"eagle3_layers_to_capture": [0, 1, 1]' in start.files["trtllm.yaml"]  # the target has too few for the usual
