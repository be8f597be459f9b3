import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.diffusion import report
from benchmarks.diffusion.converted import Answer
from benchmarks.diffusion.report import Found, draw, page, right, speed, tokens_per_forward
from benchmarks.diffusion.strategies import ITSELF, Sample
from benchmarks.diffusion.text import TextRun, text_runs

BITS = {"autoregressive": 2.0, "block 4": 2.2, "block 16": 2.4, "whole": 2.6}
RUNS = [
    TextRun(name, seed, 4, 0.001, 1.0, 1000, 10, 640, 200, bits + seed / 10, bits - 0.05, bits + 0.05, 0.1)
    for seed in (0, 1, 2)
    for name, bits in BITS.items()
]
SAMPLES = [
    Sample(ITSELF, 0, "", 0, 8, 0, 0.0, 2.0, '"abcdefgh"'),
    *(
        Sample("block 4", 0, "static=2", i, 8, 4, 0.5, 2.5 + i, json.dumps(text))
        for i, text in enumerate(["aaaaaaaa", "abababab"])
    ),
]
ANSWERS = [
    *(Answer("autoregressive", i, 11, 10, 10, int(i < 2), 1, 0, '"4"') for i in range(8)),
    *(Answer("static=2", i, 12, 12, 6, int(i < 1), 0, 0, '"4"') for i in range(7)),
    Answer("static=2", 7, 100, 100, 10, 0, 0, 1, '"4"'),
]


def test_page_has_the_parts_that_were_measured() -> None:
    assert "quick" not in page(Found(RUNS, SAMPLES, ANSWERS)) and "quick" in page(Found(RUNS, quick=True))
    assert "strategy" not in page(Found(RUNS)) and "Bits" not in page(Found(answers=ANSWERS))


def test_the_published_bits_are_those_of_the_published_runs() -> None:
    folder = Path(report.__file__).parent
    text, published = page(Found(text_runs(folder).all)), (folder / "diffusion.md").read_text()
    parts = [each.partition("## Bits per character")[2].partition("\n## ")[0].strip() for each in (text, published)]
    assert parts[0] == parts[1] != ""


def test_order_of_the_models() -> None:
    names = list(BITS)
    assert (
        f"- Order without clipping: {' < '.join(names)}. Expected of arXiv 2503.09573: {' < '.join(names)}; so it was "
        "with 3 of 3 seeds."
    ) in page(Found(RUNS))
    odd = [replace(run, bits=1.0) if run.model == "whole" and run.seed == 1 else run for run in RUNS]
    assert "whole; so it was with 2 of 3 seeds." in page(Found(odd))
    worst = [replace(run, bits=9.0) if run.model == "block 4" else run for run in RUNS]
    assert "Order without clipping: autoregressive < block 16 < whole < block 4." in page(Found(worst))
    assert "Order with clipping" not in page(Found(RUNS))
    clipped = [replace(run, model=f"{run.model} clipped") for run in RUNS if run.model != "autoregressive"]
    both = page(Found([*RUNS, *clipped]))
    assert "Order with clipping: autoregressive < block 4 clipped < block 16 clipped < whole clipped." in both
    # A seed that lacks a model tells nothing.
    assert "of 2 seeds" in page(Found([run for run in RUNS if (run.model, run.seed) != ("block 4", 2)]))


def test_figures() -> None:
    found = speed(SAMPLES[1:])
    assert (found.tokens_per_forward, found.tokens_per_second, found.bits) == (2, 16, 3)
    assert found.variety == pytest.approx(3 / 10)
    assert tokens_per_forward(ANSWERS[8:]) == 2 and right(ANSWERS[:8])[0] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    "found",
    [
        Found(RUNS, SAMPLES, ANSWERS, quick=True),
        pytest.param(Found(RUNS), marks=pytest.mark.slow),
        pytest.param(Found(answers=ANSWERS), marks=pytest.mark.slow),
    ],
)
def test_the_picture_is_drawn(found: Found, tmp_path: Path) -> None:
    draw(found, tmp_path / "diffusion.png")
    assert (tmp_path / "diffusion.png").read_bytes().startswith(b"\x89PNG")
