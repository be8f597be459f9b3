"""The benchmark of shapes: what it reads of llama-bench, what it measures, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmarks.harness.process import PeerError
from benchmarks.mixture import __main__ as mixture
from benchmarks.mixture.__main__ import OURS, THEIRS, Figure, OurModel, llama_bench, measure_llama, page
from benchmarks.mixture.shapes import SHAPES, random_values


def program(folder: Path, *lines: str) -> Path:
    path = folder / "llama-bench"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_figures_of_llama_bench_are_seconds_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(model: Path, threads: int, *options: Any) -> tuple[list[Any], int]:
        given = dict(zip(options[::2], options[1::2], strict=False))
        asked.append(given.get("-d", 0))
        sizes = [(int(size), 0) for size in str(given["-p"]).split(",") if int(size)]
        sizes += [(0, given["-n"])] if given["-n"] else []
        return [{"n_prompt": p, "n_gen": n, "avg_ns": 1_000_000 * (p + n + asked[-1])} for p, n in sizes], 5000

    monkeypatch.setattr(mixture, "llama_bench", answer)
    found = measure_llama(Path("model.gguf"), 2)
    assert found == {"prompt": 0.512, "peak": 5000, "4": 0.26, "8": 0.264, "1": 0.288 / 32}
    assert asked == [0, 256]


def test_llama_bench_is_read_or_its_last_words_are_shown(tmp_path: Path) -> None:
    fake = program(tmp_path, f'echo "$@" > {tmp_path}/asked', "echo '[{\"avg_ns\": 7}]'")
    [found], peak = llama_bench(Path("model.gguf"), 2, "-p", 512, "-n", 0, program=fake)
    assert found == {"avg_ns": 7} and peak > 100_000
    assert (tmp_path / "asked").read_text() == "-m model.gguf -t 2 -r 1 -o json -p 512 -n 0\n"
    with pytest.raises(PeerError, match="ended with 3: no such model"):
        llama_bench(Path("model.gguf"), 1, program=program(tmp_path, "echo no such model >&2", "exit 3"))


def test_the_table_has_ratios_to_llama_cpp() -> None:
    seconds = {
        OURS: {"start": 2.0, "peak": 1.5e9, "1": 0.01, "4": 0.012, "8": 0.02, "prompt": 1.0, "far": 0.015},
        THEIRS: {"peak": 2e9, "1": 0.02, "4": 0.06, "8": 0.08, "prompt": 2.56},
    }
    figures = [
        Figure("small", system, what, repeat, value * factor)
        for system, own in seconds.items()
        for what, value in own.items()
        for repeat, factor in enumerate((1.0, 0.5, 9.0))
    ]
    ours, theirs, times = page(figures, 16384).splitlines()[2:]
    assert ours == "| `small` | blockdraft | 2.0 | 1.50 | 100.0 | 1.20 | 2.00 | 512 | 1.50 |"
    assert theirs == "|  | llama.cpp |  | 2.00 | 50.0 | 3.00 | 4.00 | 200 |  |"
    assert times == "|  | times as fast |  |  | 2.00 |  |  | 2.56 |  |"


@pytest.mark.slow
def test_a_shape_is_written_and_measured(tmp_path: Path) -> None:
    args = mixture.arguments(["--quick", "--out", str(tmp_path), "--shapes", "qwen3-0.6b", "--layers", "1"])
    file = str(mixture.written("qwen3-0.6b", args))
    model = OurModel({"model": file, "threads": 1, "far": 300, "kv_dtype": "int8"})
    assert "compiled" in model.target.running and "int8 keys" in model.target.running
    assert min(model.prompt(16), model.decode(256), model.verify(256, 4)) > 0
    assert model.decode(300) > 0 and {cache.lengths[0] for cache in model._caches.values()} == {289, 333}
    with mock.patch.object(model.target, "forward", wraps=model.target.forward) as forward:
        model.decode(256)
    assert not any("logits_at" in call.kwargs for call in forward.call_args_list)  # which a prompt's end names


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_0", "MXFP4"])
def test_random_weights_are_finite_and_about_0_02(kind: str) -> None:
    import gguf
    import numpy as np

    raw = random_values(kind, (4, 512), np.random.default_rng(0))
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert values.shape == (4, 512) and 0.003 < np.abs(values).mean() < 0.06


def test_every_shape_names_its_architecture_as_gguf_does() -> None:
    import gguf

    assert {shape.architecture for shape in SHAPES.values()} <= {*gguf.MODEL_ARCH_NAMES.values()}
