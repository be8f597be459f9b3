"""Plan of the measurements, with fake processes; `make bench-sizes ARGS=--quick` measures."""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.harness.process import PeerProcess
from benchmarks.peers import environments
from benchmarks.sizes import __main__ as program
from benchmarks.sizes import pairs
from benchmarks.sizes.ways import Way
from fakes import fake, started


def test_shapes_are_measured_alone() -> None:
    for words, widths in (
        ([], ["1", "2", "4", "8"]),
        (["--quick"], ["1", "4"]),
        (["--quick", "--widths", "2"], ["2"]),
        (["--shapes", "qwen3-4b"], []),
        (["--shapes", "qwen3-4b", "--widths", "2"], ["2"]),
    ):
        assert program.arguments(words).widths == widths


def at_once() -> Executor:
    return ThreadPoolExecutor(1)


def test_a_run_goes_on_where_it_was(tmp_path: Path, constants: Callable[..., None]) -> None:
    started_now: list[str] = []

    def start(process: Way, served: list[Way], given: dict[str, object], patience: float, log: Path) -> PeerProcess:
        assert Path(str(given["target"])).is_dir() and Path(str(given["drafter"])).is_dir()
        started_now.append(process.kind)
        return started(fake(log.stem), tmp_path)

    constants(environments, BUILD=tmp_path)
    environments.folder("llama_cpp").mkdir(parents=True)
    (environments.folder("llama_cpp") / ".installed").touch()
    words = ["--widths", "1", "--methods", "chain:3", "--limit", "2", "--repeats", "1", "--tokens", "4"]
    words += ["--first", "16", "--contexts", "", "--out", str(tmp_path / "out"), "--llama", "bf16,Q4_K"]
    for kinds, expected in (("bfloat16", ["bfloat16", "bf16", "bf16", "bf16"]), ("bfloat16,int8", ["int8"])):
        started_now.clear()
        program.run(program.arguments([*words, "--kinds", kinds]), start, at_once)
        assert started_now == expected
    names = {"runs.csv", "settings.json", "sizes.md", "sizes.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "rows are no multiple of 256: llama.cpp Q4_K plain" in (tmp_path / "out" / "sizes.md").read_text()


def test_more_than_fits_is_refused_before_it_is_loaded(tmp_path: Path, free_memory: Callable[[int], None]) -> None:
    free_memory(1_000_000)
    words = ["--widths", "1", "--llama", "", "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"take about 0.0 GB together; 0.0 GB are free\. Give fewer --kinds"):
        program.run(program.arguments(words), lambda *_: pytest.fail("something was loaded"), at_once)
    assert not list((tmp_path / "out").glob("tmp*"))


def test_parameters_are_those_of_the_weights() -> None:
    assert 5_300_000 < pairs.parameters(pairs.TARGET) < 5_500_000
