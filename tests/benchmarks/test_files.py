from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.files import OURS, PROMPT, THEIRS, Answer, arguments, ours, prompts, report, theirs
from benchmarks.harness.process import PeerProcess
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target


def test_ours_is_timed_as_theirs(tiny_target_dir: Path) -> None:
    """To the first token, and tokens/s after it."""
    target = load_target(tiny_target_dir, device="cpu")
    *asked, long = prompts(target)
    assert len(long) == PROMPT and len(asked) == 3
    with Engine(target, load_drafter("none", target=target), 1) as engine:
        decode = ours(engine)
        assert decode(asked[0], 4).rate > 0
        assert decode(asked[0], 1) == Answer(pytest.approx(0, abs=10), 0.0)

    def ask(name: str, request: Any) -> dict[str, Any]:
        assert request == {"prompt": [5], "max_new_tokens": 3, "stops": []}
        return {"tokens": [1, 2, 3], "prefill_seconds": 0.5, "decode_seconds": 0.1}

    assert theirs(cast(PeerProcess, SimpleNamespace(ask=ask)))([5], 3) == Answer(0.5, pytest.approx(20))


def test_ratios_are_taken_within_a_turn() -> None:
    rates = {OURS: [Answer(0, 30), Answer(0, 300)], THEIRS: [Answer(0, 10), Answer(0, 100)]}
    told = report(rates, {OURS: [0.1], THEIRS: [0.4]})
    assert "| blockdraft | 165.0 | 100 |" in told and "| times | 3.00 | 4.00 |" in told


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments([str(tmp_path / "absent.gguf"), "--llama", str(tmp_path)])
    assert "There is no file" in capsys.readouterr().err
