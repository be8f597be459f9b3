"""Comparison with the recipe that was made by hand."""

import sys
from pathlib import Path

import pytest

from benchmarks.stranger import hour


def test_who_fails_tells_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "by-hand.log"
    hour.done(hour.limited([sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], log, 3), log)
    with pytest.raises(SystemExit, match=r"(?s)by-hand.log failed; its end is:\n3\n.*ZeroDivisionError"):
        hour.done(hour.limited([sys.executable, "-c", "1 / 0"], log, 1), log)


@pytest.mark.slow
def test_the_recipe_answers_packs_and_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[list[str]]()

    def stub(command: list[str | Path], log: Path, threads: int) -> object:
        ran.append(list(map(str, command)))
        if command[-1] == tmp_path / "answers.jsonl":  # writes on and on
            code = f"print('{{}}\\n{{', end='', file=open({str(tmp_path / 'answers.jsonl')!r}, 'w'), flush=True)"
            return real([sys.executable, "-c", f"{code}\nimport time; time.sleep(60)"], log, threads)
        if "train" in command:
            run = tmp_path / "by-hand.run"
            run.mkdir()
            wait = f"import time, pathlib\nwhile not pathlib.Path({str(run / 'finish')!r}).exists(): time.sleep(0.01)"
            return real([sys.executable, "-c", wait], log, threads)
        return real([sys.executable, "-c", ""], log, threads)

    real = hour.limited
    monkeypatch.setattr(hour, "limited", stub)
    hour.by_hand(tmp_path / "corpus.jsonl", 6.0, tmp_path, 1)
    assert [each[2].rpartition("/")[2] for each in ran] == ["write_answers.py", "pack_answers.py", "-m"]
    assert (tmp_path / "answers.jsonl").read_text() == "{}\n"  # the row that was cut off is left out
