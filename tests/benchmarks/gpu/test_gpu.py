"""The benchmark of real shapes, tried out at a tiny one on the CPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import smoke
from benchmarks.gpu.measure import PARAMS, forced_rate, gaps, profile_kernels, time_step
from benchmarks.gpu.shapes import SHAPES, build, bytes_per_token

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import TINY_DRAFTER
from blockdraft.engine.adaptive.costs import Probe

CPU = torch.device("cpu")


def test_gaps_between_kernels() -> None:
    assert gaps([]) is None
    assert gaps([(0, 4), (6, 8), (7, 10)]) == pytest.approx(0.2)
    assert gaps([(5, 6), (0, 10), (2, 3)]) == 0


@pytest.mark.parametrize(
    "tau", [pytest.param(1.0, marks=pytest.mark.slow), 2.5, pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_draft_tokens_are_right_as_often_as_asked_for(tau: float) -> None:
    target, drafter = build(SHAPES["tiny"], "hf", torch.float32, CPU)
    rate, reached = forced_rate(target, drafter, 20, tau, steps=9)
    assert rate > 0
    assert reached == pytest.approx(tau, abs=0.5 / 8)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_step_has_parts(name: str) -> None:
    target, drafter = build(SHAPES[name], "hf", torch.float32, CPU)
    probe = Probe(target, drafter)
    one = time_step(probe, 20, ChainPlan(8, [PARAMS]), repeats=3)
    assert one.draft > 0 and one.verify > 0 and one.host > 0 and one.draft + one.verify < 3 * one.total
    assert 1 <= one.tokens <= 8
    assert profile_kernels(probe, 20, ChainPlan(8, [PARAMS])) is None


def test_bytes_of_a_plain_step() -> None:
    shape = SHAPES["tiny"]
    target, _ = build(shape, "hf", torch.float32, CPU)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    weights = 4 * layer + 64 + 512 * 64  # the head, and not the embedding table
    assert bytes_per_token(target, shape.target, 0) == 4 * weights
    assert bytes_per_token(target, shape.target, 10) == 4 * (weights + 10 * 4 * 2 * 32)


def test_of_the_experts_a_few_are_read() -> None:
    shape = SHAPES["tiny-moe"]
    target, _ = build(shape, "hf", torch.float32, CPU)
    everything = sum(tensor.numel() for _, tensor in target.named_weights()) - 512 * 64
    experts = 4 * 8 * 3 * 64 * 32
    assert bytes_per_token(target, shape.target, 0) == 4 * (everything - experts * 6 / 8)


@pytest.mark.slow
def test_one_command_measures_and_writes(tmp_path: Path) -> None:
    small = ["--contexts", "16", "--trees", "16", "--repeats", "2", "--steps", "4", "--dtype", "float32"]
    program.run(program.arguments(["--device", "cpu", "--shapes", "tiny", *small, "--out", str(tmp_path)]))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [run["backend"] for run in found["runs"]] == ["hf", "native", "captured", "compiled"]
    assert found["runs"][2]["missing"] == "CUDA graphs need an NVIDIA GPU, and the device is cpu"
    [context] = found["runs"][0]["contexts"]
    assert list(context["steps"]) == ["plain", "block 8", "block 16", "tree 16"]
    assert context["steps"]["plain"]["R"] == 1
    assert 0 < context["share_of_roofline"] < 1
    assert context["forced"][0]["tau"] == 4.5
    assert str(tmp_path) not in (tmp_path / "gpu.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.arguments([])
    assert ended.value.code == 2
    assert "--device cpu --shapes tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_the_smoke_test_fails_only_where_a_token_is_wrong(
    monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    few = {name: replace(getattr(smoke, name), max_new_tokens=8) for name in ("GREEDY", "SAMPLED")}
    drafts = {
        name: (TINY_DRAFTER if drafter == "bundled" else drafter, how) for name, (drafter, how) in smoke.DRAFTS.items()
    }
    constants(smoke, REPEATS=2, CONTEXT=64, PROMPTS=smoke.PROMPTS[:2], DRAFTS=drafts, **few)
    monkeypatch.setattr(smoke, "load_target", cache(smoke.load_target))  # which takes most of the time
    right = smoke.answers

    def wrong(drafts: str, dtype: str, device: object, **how: object) -> list[list[int]]:
        found = right(drafts, dtype, device, **how)  # type: ignore[arg-type]
        found[1][7] += drafts == "tree" and dtype == "float32"
        return found

    monkeypatch.setattr(smoke, "answers", wrong)
    assert not smoke.run(CPU)
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert len(lines) == 6 + 2 + 4 + 1
    assert [line.split(", ")[1:3] for line in failed] == [["native", "tree"], ["hf", "tree"]]
    assert "3 of 4 answers" in failed[0]
