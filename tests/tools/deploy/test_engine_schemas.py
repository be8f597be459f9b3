"""For every kind of drafter in every layout, commands hold only options that the engines have, and engines that cannot
run it are named with a reason."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_schemas import check_recorded
from thinned import thinned

from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.tools.deploy.launch import ENGINES, command
from blockdraft.tools.inspect import inspect
from blockdraft.training.export import convert, export_gguf, format_for

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
def test_what_inspect_says_is_each_engines_own(
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
        said = check_recorded(engine, shlex.split(start.line), start.files)
        counts = {"vLLM": "num_speculative_tokens", "TensorRT-LLM": "max_draft_len"}
        if engine in counts and said:
            assert said[counts[engine]] == draft_tokens
            assert drafter in said.values()
        if engine == "SGLang":
            assert said["--speculative-num-draft-tokens"] == str(draft_tokens + 1)


@pytest.mark.parametrize(("kind", "engine"), thinned(KINDS, ENGINES, keep=2))
def test_launch_says_the_same_or_why_not(
    drafters: dict[str, Path], tiny_target_dir: Path, engine: str, kind: str
) -> None:
    drafter, target = str(drafters[kind]), str(tiny_target_dir)
    start = inspect(drafter, target).starts[ENGINES[engine]]
    if start.line is None:
        with pytest.raises(UsageError, match=f"{ENGINES[engine]} cannot be started with .*{start.reason}"):
            command(engine, target, drafter, 8000)
        return
    for caching in (False, True):
        found = command(engine, target, drafter, 8000, prefix_caching=caching)
        check_recorded(ENGINES[engine], found.line, found.files)
        assert found.line[: len(shlex.split(start.line))] == shlex.split(start.line)


def test_kinds_that_no_engine_runs_are_refused_by_name(drafters: dict[str, Path], tiny_target_dir: Path) -> None:
    target = str(tiny_target_dir)
    for kind, engine, told in (
        ("medusa", "sglang", "SGLang cannot be started .* it runs no Medusa heads"),
        ("medusa", "vllm", "vLLM cannot be started .* it reads Medusa's heads in a layout of its own"),
        ("mtp", "trtllm", "TensorRT-LLM cannot be started .* it runs MTP heads that lie in the target's own"),
        ("mtp", "vllm", "vLLM cannot be started .* it runs MTP heads that lie in the target's own"),
        ("dflash2", "trtllm", "how it is started with DFlash2DraftModel is not known here"),
        ("dspark", "vllm", "it reads no DSparkDraftModel in this format. Export it first: .* --format speculators"),
    ):
        with pytest.raises(UsageError, match=told):
            command(engine, target, str(drafters[kind]), 8000)


def test_eagle3_with_the_usual_taps_names_none(drafters: dict[str, Path], tiny_target_dir: Path) -> None:
    said = inspect(drafters["eagle3"], tiny_target_dir).starts["TensorRT-LLM"]
    assert '"eagle3_layers_to_capture": [0, 1, 1]' in said.files["trtllm.yaml"]  # the target has too few for the usual
