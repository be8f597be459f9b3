"""What is bundled with the package, by the figures that were measured."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import bundle
import measure
import pytest
from benchmarks.sizes.widen import widen
from making import Making, digest

from blockdraft import Drafting

Build = Callable[..., Path]
DRAFTERS = ("drafter", "drafter-dspark")


@pytest.fixture
def build(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, tiny_dspark_dir: Path) -> Build:
    """Writes what `make_pair.sh` makes."""

    def write() -> Path:
        sources = zip(("target", *DRAFTERS), (tiny_target_dir, tiny_drafter_dir, tiny_dspark_dir), strict=True)
        folders = [shutil.copytree(source, tmp_path / "build" / name) for name, source in sources]
        rates = {f"{backend}, {way}": 7.5 for backend in ("native", "hf") for way in ("plain", *DRAFTERS)}
        own = {"tau": 3.4, "tau_mean_over_answers": 3.6, "tree": {"tau": 4.1}, "sampled": {"tau": 2.2}}
        own |= {"acceptance_by_position": [0.5, 0.25], "identical_to_plain": 9}
        entry = {"prompts": 9, "ended_by_themselves": 0.9, "repetitive": 0.1}
        entry |= {"mean_tokens": 50.5, "right_answers": 0.02}
        entry |= {"tree_budget": 32, "temperature": 1.0, "tokens_per_second": rates}
        entry |= {"drafters": dict.fromkeys(DRAFTERS, own)}
        figures = {"max_new_tokens": 256, "sets": {"gsm8k": entry, "humaneval": entry}}
        figures["problems"] = {"problems": 500, "solved": {"1": 0.5, "3": 0.1}, "solved_of_one_or_two_steps": 0.42}
        figures["weights"] = {folder.name: digest(folder) for folder in folders}
        (tmp_path / "build/figures.json").write_text(json.dumps(figures))
        return tmp_path / "build"

    return write


def test_the_pair_is_copied_with_cards(build: Build, tmp_path: Path) -> None:
    out, folder = tmp_path / "pair", build()
    Making(folder / "target", "main", 0, 6144).note(100)
    log = folder / "drafter.run/log.jsonl"
    log.parent.mkdir()
    log.write_text('{"tokens": 600000, "tokens_per_second": 10000}\n')
    (folder / "answers.jsonl").write_text('{"ids": [1, 2]}\n')
    (folder / "hard_answers.jsonl").write_text('{"ids": [3]}\n{}\n')
    bundle.bundle(folder, out)
    assert {path.name for path in out.iterdir()} == {"target", "drafter"}
    target, drafter = ((out / name / "README.md").read_text() for name in ("target", "drafter"))
    assert (
        "42% of those of one or two steps; by steps: 1: 50%, 3: 10%." in target and "| main | 100 | 0.6 M |" in target
    )
    assert "DFlash v1" in drafter and "| tau of trees of 32 draft tokens | 4.10 | 4.10 |" in drafter
    assert "| drafter | 1 | 0.6 M | 1 |\n" in drafter and "Learned from 2 answers, 3 tokens." in drafter
    assert "drafted in blocks of 4 (2 CPU cores) | 7.5, 7.5 |" in drafter


def test_nothing_is_copied_that_is_too_large_or_was_not_measured(
    build: Build, tmp_path: Path, constants: Callable[..., None]
) -> None:
    folder, old = build(), tmp_path / "pair/drafter/old"
    old.parent.mkdir(parents=True)
    old.touch()
    most = bundle.MAX_BYTES
    constants(bundle, MAX_BYTES=10_000)
    with pytest.raises(SystemExit, match="would take .* is the limit"):
        bundle.bundle(folder, tmp_path / "pair")
    constants(bundle, MAX_BYTES=most)
    with (folder / "drafter/model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(SystemExit, match="with other weights of drafter than .*; delete it and measure again"):
        bundle.bundle(folder, tmp_path / "pair")
    assert [path.relative_to(tmp_path / "pair") for path in (tmp_path / "pair").rglob("*.*")] == [] and old.exists()


def test_each_drafter_is_judged_by_its_fastest_way() -> None:
    rates = {f"a, {way}": rate for way, rate in zip(measure.WIDE_WAYS, (100.0, 90.0, 50.0), strict=True)}
    rates |= {f"b, {way}": rate for way, rate in zip(measure.WIDE_WAYS, (80.0, 115.0, 110.0), strict=True)}
    assert measure.over_first(rates, ["a", "b"]) == {"b": 1.15}


@pytest.mark.slow
def test_figures_that_are_measured_make_cards(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    folder, data = build(), tmp_path / "data/prompts"
    constants(measure, WIDE_WAYS={"blocks of 2": Drafting(2)})
    problems = {"problems": 20, "solved": {"1": 0.5}, "solved_of_one_or_two_steps": 0.5}  # too long for the tiny target
    monkeypatch.setattr(measure, "solved", lambda target, count, corpus: problems)
    for name in ("target", *DRAFTERS):
        widen(folder / name, folder / "wide" / name, 2)
    data.mkdir(parents=True)
    for name in ("gsm8k", "humaneval"):
        (data / f"{name}.jsonl").write_text('{"turns": ["abc"]}\n{"turns": ["What is it?"]}\n')
    (data / "gsm8k_test_with_answers.jsonl").write_text('{"answer": "#### 1"}\n{"answer": "#### 2"}\n')
    command = ["--data", data.parent, "--target", folder / "target", "--wide", folder / "wide"]
    command += ["--max-new-tokens", 12, "--speed", 2, "--repeats", 1, "--problems", 20]
    command += ["--out", folder / "figures.json", "--drafters", *(folder / name for name in DRAFTERS)]
    measure.main(list(map(str, command)))
    figures = json.loads((folder / "figures.json").read_text())
    for result in figures["sets"].values():
        assert [own["identical_to_plain"] for own in result["drafters"].values()] == [2, 2]
        assert result["drafters"]["drafter"]["tau"] >= 1 and result["tokens_per_second"].keys() >= {"hf, plain"}
    assert figures["wide"]["over_first"]["drafter-dspark"] > 0 and figures["wide"]["prompts"] > 0
    assert bundle.bundle(folder, tmp_path / "pair").startswith(str(tmp_path / "pair"))
