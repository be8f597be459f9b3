import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
from some_results import ARGUMENTS, PLAIN_TRIAL, trial

from blockdraft.cli.display import percent
from blockdraft.cli.display import standard as plain_console
from blockdraft_bench import report
from blockdraft_bench.report import write
from blockdraft_bench.results import Results, results


def test_tables(found: Results, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(plain_console(), found)
    output = capsys.readouterr().out
    assert output.splitlines()[1:3] == ["Drafter eagle3, which has weights of 4 bits: x", ""]
    lines = [line.split() for line in output.splitlines()]
    assert [" ".join(line) for line in lines if "timed" in line] == [
        "first: 1 prompt, 1 timed",
        "second: 1 prompt, 1 timed",
        "all sets: 2 prompts, 2 timed",
    ]
    assert ["none", "1.0", "1.0-1.0", "1.00", "1.00", "1.00", "100", "0"] in lines
    assert ["x", "2.0", "2.0-2.0", "2.00", "2.00", "1.00", "67", "33", "0", "100", "0"] in lines


def test_draft_tokens_sampled_at_random_promise_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [trial(name, "a", None, 6.0, PLAIN_TRIAL) for name in ("none", "chosen", "sampled")]
    for temperature, expected in ((1.0, None), (0.0, 1.0)):
        arguments = ARGUMENTS | {"temperature": temperature}
        found = results(trials, arguments, torch.device("cpu"), sampled={"sampled"})
        assert [found.methods[name].identical for name in ("none", "chosen", "sampled")] == [1, 1, expected]
        report.show(plain_console(), found)
        output = " ".join(capsys.readouterr().out.split())
        assert ("same is ? for sampled draft tokens" in output) == (expected is None)


def test_tables_never_round_up_to_all() -> None:
    assert [percent(share) for share in (None, 0.9999, 1.0, 0.3333, 0.0)] == ["?", "99.9", "100", "33.3", "0"]


def test_a_failed_write_leaves_no_half_file(
    found: Results, tmp_path: Path, full_disk: Callable[[str], AbstractContextManager[None]]
) -> None:
    (tmp_path / "results.json").write_text("old")
    message = "results.json cannot be written .No space left on device.;"
    with full_disk("results.json"), pytest.raises(ValueError, match=message):
        write(tmp_path, found)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


def test_results_hold_the_sets_and_what_they_were_measured_with(found: Results) -> None:
    content = json.loads(found.as_json())
    assert content.keys() == {"methods", "sets", "arguments", "versions", "hardware", "profiles"}
    assert content["versions"].keys() == {"blockdraft", "torch", "transformers", "python"}
    assert content["hardware"].keys() == {"cpu", "cores", "logical_cores", "threads", "memory_bytes", "gpu"}
    assert content["hardware"]["memory_bytes"] == psutil.virtual_memory().total
    assert content["hardware"]["cpu"] and content["hardware"]["gpu"] is None
    assert {name: one["x"]["speedup"] for name, one in content["sets"].items()} == {"first": 2, "second": 3}
    assert content["methods"]["x"]["speedup"] == pytest.approx(12 / 5)  # 12 tokens in 5 seconds against 12 in 12
    assert content["methods"]["x"]["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert found.arguments == ARGUMENTS
