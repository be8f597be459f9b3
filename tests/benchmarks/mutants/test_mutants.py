"""The tool on a small tree of its own, and a check that every mutation fits the code."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks.mutants.__main__ import Kept, examine, results_table, sound
from benchmarks.mutants.mutant import FOLDER, ROOT, Mutant, Result, _outcome, fingerprint, judge, read

MUTANTS = read(sorted(FOLDER.glob("*.toml")))
SOURCE = "def double(x):\n    return x + x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = "from toy import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.mark.parametrize("table", sorted(FOLDER.glob("*.toml")), ids=lambda table: table.stem)
def test_every_mutation_fits_the_code_and_names_tests(table: Path) -> None:
    text = cache(lambda file: (ROOT / file).read_text(encoding="utf-8"))
    for mutant in read([table]):
        mutant.applied(text(mutant.file))
        assert mutant.tests and mutant.why.endswith(".")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), test
            assert not name or f"def {name.partition('[')[0]}(" in text(file), test


def test_no_mutation_is_there_twice() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"src/toy.py": SOURCE, "tests/test_toy.py": TESTS}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def toy(old: str, new: str, tests: str = "tests/test_toy.py") -> Mutant:
    return Mutant("src/toy.py", old, new, (tests,), "It is broken.")


@pytest.mark.slow
def test_outcomes(tree: Path, tmp_path: Path) -> None:
    caught, survivor = toy("x + x", "x * x"), toy("x / 2", "x / 3")
    stale = [toy("y", "z"), toy("x", "y"), toy("x + x", "x + x"), toy("x + x", "x +"), toy("x + x", "1", "tests/no.py")]
    found = [judge(mutant, tree, tmp_path / "cache", 60.0) for mutant in (caught, survivor, *stale)]
    assert [result.outcome for result in found] == ["caught", "survived", *["stale"] * 5]
    assert found[0].by == "tests/test_toy.py::test_double"
    assert (tree / "src/toy.py").read_text() == SOURCE  # every change undone


def test_what_pytest_says_is_told_apart() -> None:
    assert _outcome(1, "..F\nFAILED tests/a.py::test_b - assert 1\n") == ("caught", "tests/a.py::test_b")
    assert _outcome(3, "FAILED tests/a.py::test_b - assert 1\na thread raised\n") == ("caught", "tests/a.py::test_b")
    assert _outcome(1, "..Timeout (0:05:00)!\nThread 0x1\n") == ("caught", "ran out of time")
    assert _outcome(0, "...\n3 passed, 1 skipped in 0.1s") == ("survived", "")
    assert _outcome(0, "ss\n2 skipped in 0.1s") == ("skipped", "its tests cannot run here")
    assert _outcome(4, "ERROR: file or directory not found: tests/no.py\n")[0] == "stale"


@pytest.mark.slow
def test_what_never_ends_and_what_ends_the_process_is_caught(tree: Path, tmp_path: Path) -> None:
    endless = judge(toy("    return x + x", "    while True: pass"), tree, tmp_path / "cache", 5.0)
    fatal = judge(toy("    return x + x", "    import os\n    os.abort()"), tree, tmp_path / "cache", 60.0)
    assert (endless.outcome, endless.by) == ("caught", "ran out of time")
    assert (fatal.outcome, fatal.by) == ("caught", "the process ended with -6")


@pytest.mark.slow
def test_results_are_kept_until_the_code_changes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants, file = [toy("x + x", "x * x"), toy("x / 2", "x / 3")], tmp_path / "build" / "results.json"
    results = examine(mutants, tree, Kept(file, fingerprint(tree)), 2, 60.0)
    assert "[2/2, 0.0 min left]" in capsys.readouterr().out
    monkeypatch.setattr("benchmarks.mutants.__main__.judge", None)  # nothing is left to judge
    assert sorted(examine(mutants, tree, Kept(file, fingerprint(tree)), 2, 60.0), key=repr) == sorted(results, key=repr)
    assert Kept(file, fingerprint(tree), anew=True).find(mutants[0]) is None
    (tree / "src/toy.py").write_text(SOURCE + "# another comment\n")
    assert Kept(file, fingerprint(tree)).find(mutants[0]) is None


@pytest.mark.slow
def test_tests_that_fail_anyway_are_found_first(tree: Path) -> None:
    assert sound([toy("x + x", "x * x")], tree, 60.0) == ""
    (tree / "tests/test_toy.py").write_text(TESTS.replace("6", "7"))
    assert "assert 6 == 7" in sound([toy("x + x", "x * x")], tree, 60.0)


def test_survivors_come_first_in_the_table(tree: Path) -> None:
    results = [(toy("x + x", "0"), Result("caught", 1.0, "a test")), (toy("x / 2", "0"), Result("survived", 2.0, ""))]
    lines = results_table(results, tree).splitlines()
    assert ["survived" in lines[2], "src/toy.py:6" in lines[2], "caught" in lines[3]] == [True] * 3
