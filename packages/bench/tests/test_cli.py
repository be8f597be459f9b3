"""`blockdraft bench` on tiny random models: what it prints and writes, and how it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from blockdraft_bench import speed

METHOD_KEYS = {"tokens_per_second", "speedup", "tau", "acceptance_by_position", "step_cost", "identical"}
METHODS = ["none", "chain", "chain:3"]


Run = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[Path, Path]:
    """Two sets of two prompts and one."""
    paths = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    paths[0].write_text('{"turns": ["one", "never read"]}\n{"turns": ["two"]}\n')
    paths[1].write_text('{"prompt": "three"}\n')
    return paths


@pytest.fixture
def bench(blockdraft: Run, tiny_target_dir: Path, tiny_drafter_dir: Path, prompts: tuple[Path, Path]) -> Run:
    """Runs `blockdraft bench` on the tiny pair, 8 tokens and 2 repeats by default; later options win."""
    pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir, "--device", "cpu")
    size = ("--max-new-tokens", 8, "--repeats", 2, "--methods", "chain,chain:3")
    sets = [part for path in prompts for part in ("--prompts", path)]
    return lambda *args: blockdraft("bench", *pair, *size, *sets, *args)


def test_written_and_printed(bench: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = bench("--out", out, "--tree-budget", 5, "--seed", 3)
    assert result.code == 0
    output = json.loads((out / "results.json").read_text())
    assert list(output["methods"]) == METHODS and list(output["sets"]) == ["first", "second"]
    for methods in (output["methods"], *output["sets"].values()):
        assert list(methods) == METHODS
        for entry in methods.values():
            assert entry.keys() > METHOD_KEYS
            assert len(entry["tokens_per_second_by_repeat"]) == 2
            assert entry["identical"] == 1.0
    assert output["methods"]["none"]["tau"] == output["methods"]["none"]["speedup"] == 1.0
    assert len(output["methods"]["chain:3"]["acceptance_by_position"]) == 2
    assert {name: entry["none"]["prompts"] for name, entry in output["sets"].items()} == {
        "first": 2,
        "second": 1,
    }
    arguments = output["arguments"]
    assert arguments["methods"] == METHODS and (arguments["seed"], arguments["tree_budget"]) == (3, 5)
    assert (arguments["dtype"], arguments["device"], arguments["limit"]) == ("float32", "cpu", None)
    assert arguments["kinds"] == {"none": "none", "chain": "dflash", "chain:3": "dflash"}
    assert "\nDrafter dflash: chain, chain:3\n" in result.out
    assert len(re.findall(r"^chain:3 +\d+\.\d ", result.out, re.M)) == 3
    assert re.search(r"^round 2 of 2: 21 of 21 answers$", result.err, re.M)
    assert 1 < result.err.count("\n") <= 10


def test_json(bench: Run) -> None:
    result = bench("--json", "--limit", 1, "--batch-size", 2, "--temperature", 1, "--methods", "none")
    output = json.loads(result.out)
    assert result.code == 0
    assert list(output["methods"]) == ["none"]
    assert (output["methods"]["none"]["prompts"], output["methods"]["none"]["identical"]) == (2, 1.0)
    assert type(output["arguments"]["seed"]) is int


def test_sampled_answers_are_compared_where_a_seed_decides_them(bench: Run) -> None:
    methods = "chain,tree:4,chain-sampled"
    output = json.loads(bench("--json", "--limit", 1, "--repeats", 1, "--temperature", 1, "--methods", methods).out)
    shares = {name: entry["identical"] for name, entry in output["methods"].items()}
    assert shares == {"none": 1.0, "chain": 1.0, "tree:4": 1.0, "chain-sampled": None}


def test_results_are_not_overwritten_unasked(bench: Run, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("old")
    result = bench("--out", tmp_path)
    refused(result, "results.json exists")
    assert (tmp_path / "results.json").read_text() == "old"
    assert bench("--out", tmp_path, "--overwrite", "--limit", 1, "--methods", "none").code == 0
    assert json.loads((tmp_path / "results.json").read_text())["arguments"]["limit"] == 1


def test_results_are_printed_after_a_failed_write(
    bench: Run, tmp_path: Path, full_disk: Callable[[str], AbstractContextManager[None]]
) -> None:
    with full_disk("results.json"):
        result = bench("--out", tmp_path, "--limit", 1)
    assert result.code == 2 and "No space left on device" in result.err.splitlines()[-1]
    assert "chain:3" in result.out


def test_ctrl_c(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = speed.Engine.generate, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 14:  # three answers of reference, three to warm up, and then in the first round
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(speed.Engine, "generate", interrupted)
    result = bench("--out", tmp_path / "out")
    assert (result.code, result.out) == (130, "")
    assert result.err.endswith("Interrupted; the measurements are discarded, and nothing was written.\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods", "abacus"], "Method 'abacus': abacus is no drafter"),
        (["--methods", "chain:9"], "must be at most 8"),
        (["--block-size", "many"], "--block-size must be a whole number or 'auto', got 'many'"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-new-tokens", "250"], "Prompt 1 of first: The prompt's"),
        (["--out", "/dev/null"], "/dev/null is no folder"),
    ],
)
def test_bad_input(bench: Run, args: list[str], message: str) -> None:
    refused(bench(*args), message)


def refused(result: Any, message: str) -> None:
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ") and message in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_profile(bench: Run, tmp_path: Path) -> None:
    result = bench("--out", tmp_path, "--profile", "--draft-window", 3)
    assert result.code == 0
    output = json.loads((tmp_path / "results.json").read_text())
    assert list(output["profiles"]) == METHODS and output["arguments"]["draft_window"] == 3
    assert output["profiles"]["none"]["seconds"]["draft pass"] == 0 < output["profiles"]["none"]["host"] < 1
    assert re.search(r"^draft pass +0\.000 \( 0\.0\) +\d\.\d{3} \([ \d]\d\.\d\)", result.out, re.M)
    shares = re.search(r"^host +\S+ \( *(\S+)\)", result.out, re.M)
    assert shares and float(shares[1]) == pytest.approx(100 * output["profiles"]["none"]["host"], abs=0.06)


def test_bits_of_drafters_are_reported(
    bench: Run, tmp_path: Path, tiny_drafter_dir: Path, tiny_eagle3_dir: Path
) -> None:
    few, four = tmp_path / "results.json", tmp_path / "four"
    shutil.copytree(tiny_eagle3_dir, four)
    raw = json.loads((four / "config.json").read_text())
    (four / "config.json").write_text(json.dumps(raw | {"qat_bits": 4}))
    methods = ("chain:4", f"{four}:4", f"{four}+chain:4", "lookup+chain:4")
    output = bench("--out", tmp_path, "--methods", ",".join(methods), "--repeats", 1, "--quantize", "int8")
    bits = json.loads(few.read_text())["arguments"]["drafter_bits"]
    assert output.code == 0 and bits == {"none": None} | dict(zip(methods, (8, 4, [4, 8], 8), strict=True))
    assert "Drafter dflash, which has weights of 8 bits: chain:4\n" in output.out
    assert "Drafter eagle3+dflash, which has weights of 4 bits, 8 bits: " in output.out
    assert "Drafter lookup+dflash, which has weights of 8 bits: " in output.out


def test_a_draft_vocabulary_is_for_drafters_with_a_network(bench: Run, tmp_path: Path, tiny_drafter_dir: Path) -> None:
    few = ("--repeats", 1, "--drafter", tiny_drafter_dir, "--draft-vocab", 40)
    output = bench("--out", tmp_path, "--methods", "none,lookup:auto,chain:4", *few)
    assert output.code == 0 and re.search(r"^chain:4 .* 100 ", output.out, re.M)
    assert "\nDrafter dflash, which proposes 40 of 265 tokens: chain:4\n" in output.out
    arguments = json.loads((tmp_path / "results.json").read_text())["arguments"]
    assert (arguments["draft_vocab"], arguments["vocab_size"]) == ("40", 265)
    assert arguments["draft_vocabs"] == {"none": None, "lookup:auto": None, "chain:4": 40}
    assert arguments["drafter_bits"] == dict.fromkeys(arguments["draft_vocabs"])
    output = bench("--methods", "none,lookup", *few)
    assert output.code == 2 and "no method has a drafter with a network" in output.err
    output = bench("--methods", "none,chain:4", *few[:-1], "no.json")
    assert output.code == 2 and "--draft-vocab is 'no.json', which is no file" in output.err
