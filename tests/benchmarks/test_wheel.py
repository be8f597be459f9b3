"""Checks of wheels. `make wheel` builds them and uses them."""

import zipfile
from pathlib import Path

import pytest
from benchmarks import wheel

TRACKED = ["README.md", "src/blockdraft/kernels/cpu/decoder.c", "src/blockdraft/pair/tiny/target/config.json"]
LIBRARY = "blockdraft/kernels/cpu/libraries/one.so"
GOOD = [
    "blockdraft/kernels/cpu/decoder.c",
    "blockdraft/pair/tiny/target/config.json",
    "blockdraft-0.1.0.dist-info/RECORD",
    LIBRARY,
]


def made(folder: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(folder / "a.whl", "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return folder / "a.whl"


def test_a_wheel_holds_the_package_and_libraries(tmp_path: Path) -> None:
    wheel.check_contents(made(tmp_path, GOOD), TRACKED, has_libraries=True)


@pytest.mark.parametrize("name", [GOOD[0], GOOD[1], LIBRARY])
def test_nothing_may_be_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match="has no libraries" if name == LIBRARY else f"lacks .*{name}"):
        wheel.check_contents(made(tmp_path, [each for each in GOOD if each != name]), TRACKED, has_libraries=True)


def test_nothing_else_may_be_in_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"should not have \['blockdraft/notes.txt'\]"):
        wheel.check_contents(made(tmp_path, [*GOOD, "blockdraft/notes.txt"]), TRACKED, has_libraries=True)


def test_the_package_is_what_git_knows() -> None:
    names = wheel.tracked()
    assert {
        "pyproject.toml",
        "src/blockdraft/kernels/cpu/decoder.c",
        "src/blockdraft/pair/tiny/target/model.safetensors",
    } <= {*names}
    assert not any("egg-info" in name or "libraries" in name for name in names)


def test_other_wheels_have_no_libraries(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="should not have"):
        wheel.check_contents(made(tmp_path, GOOD), TRACKED, has_libraries=False)


def test_packages_come_with_those_that_they_need() -> None:
    assert wheel.needed_by("blockdraft") == ["blockdraft"]
    assert wheel.needed_by("blockdraft-radar") == ["blockdraft", "blockdraft-radar"]
    trained = ["blockdraft", "blockdraft-bench", "blockdraft-tools", "blockdraft-train"]
    assert sorted(wheel.needed_by("blockdraft-train")) == trained
    assert sorted(wheel.needed_by("blockdraft-diffusion")) == sorted([*trained, "blockdraft-diffusion"])
    assert all((wheel.ROOT / folder / "pyproject.toml").exists() for folder in wheel.FOLDERS.values())
