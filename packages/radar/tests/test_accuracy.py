"""Projections beside published speeds: how near they come, that constants can be fitted, and the page of docs."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness.command import ROOT
from benchmarks.radar.__main__ import constants_toml, main
from benchmarks.radar.accuracy import ASKED, CLAIMS, claims, fit, projection, shares, verdicts
from benchmarks.radar.published import Measured, published, read_published
from pydantic import TypeAdapter

from blockdraft.models import known
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.project import batch_for, project
from blockdraft_radar.shape import read_shape
from blockdraft_radar.step import BITS, CONSTANTS, Constants, constants

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib


def test_the_half_that_judges_is_met() -> None:
    reached = shares(list(verdicts(row for row in published() if not row.fitted)))
    assert all(reached[name] >= share for name, share in ASKED.items())


@pytest.mark.parametrize("kind", ["nvidia-consumer", "nvidia-datacentre", "apple", "tpu"])
def test_classes_are_met_one_by_one(kind: str) -> None:
    results = list(verdicts(row for row in published() if row.kind == kind))
    assert shares(results)["near"] >= 0.5 and shares(results)["inside"] >= 0.8


def test_a_text_alone_is_never_faster_than_its_weights_are_read() -> None:
    for row in published():
        if row.batch == 1:
            model, device, results = known(row.model), find(row.device), projection(row)
            read = (model.active_parameters or model.parameters or 0) * int(BITS[row.weights]) / 8
            assert results.plain.mid * read < 1e9 * device.bandwidth_gbs


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim['device']} {claim['weights']}")
def test_speeds_that_no_single_text_gets(claim: dict[str, object]) -> None:
    shape, machine = read_shape(str(claim["model"])), machine_of(find(str(claim["device"])))
    weights, speed = str(claim["weights"]), float(str(claim["speed"]))
    alone = project(shape, machine, weights, context=1024)
    assert alone.drafted and max(alone.plain.high, alone.drafted.high) < speed / 10
    texts = batch_for(speed, shape, machine, weights=weights, context=1024)
    if texts is not None:
        enough = project(shape, machine, weights, context=1024, batch=texts)
        less = project(shape, machine, weights, context=1024, batch=texts // 2)
        assert enough.fits and enough.drafted and less.drafted
        assert max(enough.plain.mid, enough.drafted.mid) >= speed > max(less.plain.mid, less.drafted.mid)


def test_a_70b_on_one_card_takes_a_batch_for_9000_tokens_a_second() -> None:
    taken = {f"{line[3]} {line[2]}": line[-1] for line in claims()}
    assert taken["RTX 5090 int4"] == "its weights do not fit its memory"
    assert re.fullmatch(r"\d+ sequences", taken["B200 SXM nvfp4"])


@pytest.mark.slow
def test_constants_are_fitted_to_what_was_measured() -> None:
    first = constants()["nvidia-consumer"]
    truth = replace(first, bandwidth=0.6 * first.bandwidth)
    row = "device = '{}'\nmodel = '{}'\nweights = 'bf16'\ncontext = 512\nbatch = 1\ntask = 'mean'\nmethod = 'plain'\n"
    pairs = [
        (device, model)
        for device in ("RTX 4090", "RTX 3090", "RTX 5090")
        for model in ("qwen2.5-7b", "llama-3.2-3b", "qwen3-4b", "qwen2.5-3b")
    ]
    text = "".join(
        f"[[measured]]\n{row.format(*pair)}engine = 'x'\nplain = 1.0\nsource = 'https://example.org'\n"
        for pair in pairs
    )
    rows = [row for row in read_published(text) if row.fitted]
    made = [Measured(**{**row.model_dump(), "plain": projection(row, truth).plain.mid}) for row in rows]
    assert len(made) >= 4
    results = fit(made)
    off = [abs(verdict.off) for verdict in verdicts(made, results["nvidia-consumer"])]
    assert max(off) < 0.1 < max(abs(verdict.off) for verdict in verdicts(made, first))
    assert results["cpu"] == constants()["cpu"] and not results["apple"].reported


def test_constants_are_written_as_they_are_read() -> None:
    text = constants_toml(CONSTANTS.read_text(encoding="utf-8"), constants())
    assert text.startswith("# What devices")
    assert TypeAdapter(dict[str, Constants]).validate_python(tomllib.loads(text)) == constants()


def test_the_page_shows_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert "figures that judge" in capsys.readouterr().out
    folders = (tmp_path, ROOT / "packages/radar/benchmarks/radar")
    written, kept = ((folder / "accuracy.md").read_text(encoding="utf-8") for folder in folders)
    for page in (written, kept):
        for row in published():
            assert f"({row.source})" in page and f"| {row.device} | {row.model} |" in page
    lines = [sum(line.endswith(") |") for line in page.splitlines()) for page in (written, kept)]
    assert min(lines) >= sum(1 for row in published() for _ in row.figures())
