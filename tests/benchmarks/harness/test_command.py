from pathlib import Path

import pytest
from benchmarks.harness.command import in_words, keep_settings
from benchmarks.harness.process import PeerError

from blockdraft.errors import ClosedError


def test_figures_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    for _ in range(2):
        keep_settings(tmp_path, {"tokens": 32, "threads": 2})
    with pytest.raises(ValueError, match="other tokens; choose another --out, or add --anew"):
        keep_settings(tmp_path, {"tokens": 96, "threads": 2})


@pytest.mark.parametrize("error", [ValueError("it is odd"), PeerError("it is odd"), ClosedError("it is odd")])
def test_errors_take_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, in_words():
        raise error
    assert ended.value.code == 2 and capsys.readouterr().err == "error: it is odd\n"


def test_bugs_and_interruptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), in_words():
        raise KeyError
    with pytest.raises(SystemExit) as ended, in_words():
        raise KeyboardInterrupt
    assert ended.value.code == 130 and "goes on from here" in capsys.readouterr().err
