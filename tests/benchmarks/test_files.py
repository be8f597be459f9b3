from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks import files
from benchmarks.files import OURS, PROMPT, THEIRS, Answer, arguments, ours, prompts, report, their_ways, theirs
from benchmarks.harness.process import PeerError, PeerProcess

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.models import bundled_drafter, known
from blockdraft.targets import load_target
from blockdraft.tools.export import export_gguf


def test_ours_is_timed_as_theirs(tiny_target_dir: Path) -> None:
    """To the first token, and from there to the last."""
    target = load_target(tiny_target_dir, device="cpu")
    *asked, long = prompts(target)
    assert len(long) == PROMPT and len(asked) == 3
    with Engine(target, load_drafter("none", target=target), 1) as engine:
        decode = ours(engine)
        first, seconds, *counts = decode(asked[0], 4)
        assert counts == [3, 3] and first > 0 and seconds > 0
        assert decode(asked[0], 1)[1:] == (0, 0, 0)

    def ask(name: str, request: Any) -> dict[str, Any]:
        assert request == {"prompt": [5], "max_new_tokens": 3, "stops": [2]}
        return {"tokens": [1, 2, 3], "first": 1, "steps": 1, "prefill_seconds": 0.5, "decode_seconds": 0.1}

    assert theirs(cast(PeerProcess, SimpleNamespace(ask=ask)), [2])([5], 3) == Answer(0.5, 0.1, 2, 1)


def test_prompts_of_files(tiny_target_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    target = load_target(tiny_target_dir, device="cpu")
    assert [len(prompts(target, [file], limit)) for limit in (None, 1)] == [3, 2]


def test_llama_cpp_drafts_with_the_same_file() -> None:
    assert their_ways(None) == {THEIRS: {}}
    drafter = bundled_drafter(known("smollm2"))
    found = their_ways(drafter)
    assert found["llama.cpp draft-eagle3:2"] == {
        "speculator": "draft-eagle3",
        "draft": str(drafter),
        "draft_tokens": 2,
    }
    assert list(found)[1:3] == ["llama.cpp ngram-simple", "llama.cpp ngram-cache"] and len(found) == 6


def test_ratios_are_taken_within_a_round() -> None:
    def rounds(*rates: int, forwards: int = 6) -> list[list[Answer]]:
        return [[Answer(0, 1, rate, forwards), Answer(0, 1, 2 * rate, forwards)] for rate in rates]

    found = {
        OURS: rounds(30, 300),
        f"{OURS} drafter": rounds(60, 60),
        THEIRS: rounds(10, 100),
        f"{THEIRS} x": rounds(5, 5),
    }
    told = report(found, dict.fromkeys(found, [0.1]) | {THEIRS: [0.4]})
    assert "| blockdraft | 247.5 | 45.0-450.0 | 3.00 | 41.25 | 100 | 4.00 |" in told
    assert "| blockdraft drafter | 90.0 | 90.0-90.0 | 3.30 | 15.00 | 100 | 4.00 |" in told
    assert told.endswith("Fastest: blockdraft over llama.cpp: 3.00 times")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path) -> list[dict[str, Any]]:
    """Settings of processes that stand for llama.cpp, with a long prompt that fits the tiny target."""
    found: list[dict[str, Any]] = []

    class Peer:
        def __init__(self, command: list[str], settings: dict[str, Any], *_: object) -> None:
            if settings.get("speculator") == "broken":
                raise PeerError("it ended")
            found.append(settings)
            self.answered = 0

        def __enter__(self) -> "Peer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
            count, self.answered = request["max_new_tokens"], self.answered + 1
            pace = 0.1 if self.answered > 4 else 5.0  # the first round warms up
            times = {"prefill_seconds": 0.1, "decode_seconds": pace * (count - 1)}
            return {"tokens": [1] * count, "first": 1, "steps": count - 1, **times}

    monkeypatch.setattr(files, "PeerProcess", Peer)
    monkeypatch.setattr(files, "PROMPT", 128)
    monkeypatch.setattr(files, "load_target", lambda *_, **__: load_target(tiny_target_dir, device="cpu"))
    return found


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    file = tmp_path / "model"
    file.touch()
    return [str(file), "--llama", str(file), "--tokens", "4", "--rounds", "2"]


def test_the_whole_command(asked: list[dict[str, Any]], command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    files.main(command)
    out = capsys.readouterr().out
    assert "3 of 3 prompts, up to 4 tokens, 2 rounds" in out
    assert "| llama.cpp | 10.0 | 10.0-10.0 | 1.00 | 1.00 | 100 |" in out
    assert [each["max_length"] for each in asked] == [128 + 4 + 64]


def test_a_drafter_drafts_on_both_sides(
    asked: list[dict[str, Any]], command: list[str], tmp_path: Path, tiny_drafter_dir: Path, tiny_target_dir: Path
) -> None:
    drafter = export_gguf(tiny_drafter_dir, tmp_path / "gguf", tiny_target_dir, "f32").drafter
    files.main([*command, "--drafter", str(drafter)])
    assert [each["draft"] for each in asked if "draft" in each] == [None, None, *[str(drafter)] * 3]
    target = load_target(tiny_target_dir, device="cpu")
    engines = files.our_ways(target, drafter)
    assert [engine.drafter.kind for engine in engines.values()] == ["none", "dflash", "lookup+dflash"]
    assert [engine.drafter.path for engine in engines.values()] == [None, drafter, drafter]


def test_answers_that_cannot_be_timed_are_left_out() -> None:
    loop, word, good = [7, 8] * 40, [5], list(range(40))

    def generate(prompts: list[list[int]], params: Any) -> list[Any]:
        return [SimpleNamespace(token_ids={1: loop, 2: word, 3: good}[prompt[0]]) for prompt in prompts]

    engine: Any = SimpleNamespace(generate=generate)
    assert files.usable(engine, [[1], [2], [3]], 80) == [[3]]
    with pytest.raises(
        ValueError, match="All 2 prompts are answered in a loop or with a word; .* number of tokens than 80"
    ):
        files.usable(engine, [[1], [2]], 80)
    silent = {OURS: [[Answer(0, 1, 5, 5)]], THEIRS: [[Answer(0, 0, 0, 0)]]}
    with pytest.raises(ValueError, match="llama.cpp answered all prompts of a round with one token"):
        report(silent, dict.fromkeys(silent, [0.1]))


def test_errors_name_the_way(
    asked: list[dict[str, Any]],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(files, "their_ways", lambda drafter: {THEIRS: {}, "llama.cpp x": {"speculator": "broken"}})
    with pytest.raises(SystemExit):
        files.main(command)
    assert capsys.readouterr().err.endswith("error: llama.cpp x: it ended\n")
    with pytest.raises(SystemExit):
        files.main([*command, "--limit", "1"])
    assert "--limit is 1, which goes with --prompts" in capsys.readouterr().err


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments([str(tmp_path / "absent.gguf"), "--llama", str(tmp_path)])
    assert "There is no file" in capsys.readouterr().err
