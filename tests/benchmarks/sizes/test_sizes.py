"""What is made of all runs, and what is measured; measuring itself is `make bench-sizes ARGS=--quick`."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import fake, started
from made import CHAIN, PLAIN_WAY, THEIR_CHAIN, THEIRS, run

from benchmarks.harness.process import PeerProcess
from benchmarks.peers import environments
from benchmarks.sizes import __main__ as program
from benchmarks.sizes import pairs
from benchmarks.sizes.report import changed, draw, page
from benchmarks.sizes.ways import Way

RUNS = [
    run(way, seconds * factor, repeat, size=size, parameters=parameters, name=name)
    for way, seconds in ((PLAIN_WAY, 4), (CHAIN, 2), (THEIRS, 5), (THEIR_CHAIN, 2.5))
    for size, factor, parameters in (("1", 0.01, 5_400_000), ("4", 0.1, 75_000_000))
    for name in ("answers", "first 16", "context 256")
    for repeat in range(3)
]


def test_the_page_has_every_size() -> None:
    missing = {("1", Way("ours", "int4", method)): "no such kind" for method in ("plain", "chain:3")}
    text = page(RUNS, missing)
    assert "| 5 M | bfloat16 | 100 | 2.00 (2.00 to 2.00), tau 2.00 |" in text
    assert (
        "| 75 M | 16 | 10 (bfloat16) | 20 (bfloat16, chain:3) | 8 (bf16) | 16 (bf16, chain:3, drafter bf16) |" in text
    )
    assert "| 1.25 (1.25 to 1.25) | 1.25 (1.25 to 1.25) |" in text
    assert "## Behind 256 tokens" in text
    assert "| 5 M | ours | bfloat16 | 1.00 | 0.5 | 0.5 |" in text
    assert "5 M: 100% of our answers in bfloat16 are llama.cpp's." in text
    assert "- no such kind: ours int4 plain at 1, ours int4 chain:3 at 1" in text


def test_ways_that_change_tokens_are_named() -> None:
    assert changed(RUNS) == []
    assert changed([*RUNS, run(CHAIN, 1, 3, size="4", answer="1 9")]) == ["bfloat16 chain:3 at 4"]
    assert changed([*RUNS, run(THEIR_CHAIN, 1, 3, answer="1 9")]) == []


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(RUNS, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_shapes_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, widths in (
        ([], "1,2,4,8"),
        (["--quick"], "1,4"),
        (["--quick", "--widths", "2"], "2"),
        (["--shapes", "qwen3-4b"], ""),
        (["--shapes", "qwen3-4b", "--widths", "2"], "2"),
    ):
        monkeypatch.setattr(sys, "argv", ["sizes", *words])
        assert program.arguments().widths == widths


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_now: list[str] = []

    def start(process: Way, served: list[Way], given: dict[str, object], patience: float, log: Path) -> PeerProcess:
        assert Path(str(given["target"])).is_dir() and Path(str(given["drafter"])).is_dir()
        started_now.append(process.kind)
        return started(fake(log.stem), tmp_path)

    monkeypatch.setattr(program, "start", start)
    monkeypatch.setattr(program, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))  # starts at once
    monkeypatch.setattr(program.report, "draw", lambda runs, path: path.touch())
    monkeypatch.setattr(environments, "why_missing", lambda name: None)
    words = ["--widths", "1", "--methods", "chain:3", "--limit", "2", "--repeats", "1", "--tokens", "4"]
    words += ["--first", "16", "--contexts", "", "--out", str(tmp_path / "out"), "--llama", "bf16,Q4_K"]
    for kinds, expected in (("bfloat16", ["bfloat16", "bf16", "bf16", "bf16"]), ("bfloat16,int8", ["int8"])):
        monkeypatch.setattr(sys, "argv", ["sizes", *words, "--kinds", kinds])
        started_now.clear()
        program.run(program.arguments())
        assert started_now == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "runs.csv",
        "settings.json",
        "sizes.md",
        "sizes.png",
    }
    assert "rows are no multiple of 256: llama.cpp Q4_K plain" in (tmp_path / "out" / "sizes.md").read_text()


def test_more_than_fits_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(program, "start", lambda *_: pytest.fail("something was loaded"))
    monkeypatch.setattr(program.psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    monkeypatch.setattr(sys, "argv", ["sizes", "--widths", "1", "--llama", "", "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match=r"take about 0.0 GB together; 0.0 GB are free\. Give fewer --kinds"):
        program.run(program.arguments())
    assert not list((tmp_path / "out").glob("tmp*"))


def test_parameters_are_those_of_the_weights() -> None:
    assert 5_300_000 < pairs.parameters(pairs.TARGET) < 5_500_000
