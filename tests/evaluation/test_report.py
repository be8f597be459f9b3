import pytest
import torch
from some_results import ARGUMENTS, PLAIN_TRIAL, trial

from blockdraft.cli.display import plain as plain_console
from blockdraft.evaluation import report
from blockdraft.evaluation.results import Results, results


def test_tables(found: Results, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(plain_console(), found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(line) for line in lines if "timed" in line] == [
        "first: 1 prompt, 1 timed",
        "second: 1 prompt, 1 timed",
        "all sets: 2 prompts, 2 timed",
    ]
    assert ["none", "1.0", "1.0-1.0", "1.00", "1.00", "1.00", "100", "0"] in lines
    assert ["x", "2.0", "2.0-2.0", "2.00", "2.00", "1.00", "67", "33", "0", "100", "0"] in lines


def test_methods_are_shown_by_their_shape(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [trial(name, "a", repeat, 6.0, PLAIN_TRIAL) for name in ("none", "ddtree:8") for repeat in (None, 0, 1)]
    found = results(trials, ARGUMENTS, torch.device("cpu"))
    report.show(plain_console(), found)
    told = capsys.readouterr().out
    assert "tree:8 " in told and "ddtree" not in told and list(found.methods) == ["none", "ddtree:8"]


def test_guesses_sampled_at_random_promise_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [trial(name, "a", None, 6.0, PLAIN_TRIAL) for name in ("none", "chosen", "sampled")]
    for temperature, expected in ((1.0, None), (0.0, 1.0)):
        arguments = ARGUMENTS | {"temperature": temperature}
        found = results(trials, arguments, torch.device("cpu"), sampled={"sampled"})
        assert [found.methods[name].identical for name in ("none", "chosen", "sampled")] == [1, 1, expected]
        report.show(plain_console(), found)
        told = " ".join(capsys.readouterr().out.split())
        assert ("same is ? where guesses are sampled at random" in told) == (expected is None)


def test_tables_never_round_up_to_all() -> None:
    assert [report._percent(share) for share in (None, 0.9999, 1.0, 0.3333, 0.0)] == ["?", "99.9", "100", "33.3", "0"]
