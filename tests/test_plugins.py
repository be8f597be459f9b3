import logging
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import typer.main
from installed_plugin import forget

from blockdraft import drafters, load_target
from blockdraft.errors import UsageError
from blockdraft.formats import quantized
from blockdraft.plugins import (
    COMMANDS,
    DRAFTERS,
    KINDS,
    PACKAGES,
    drafter_modules,
    entry_points,
    install_hint,
    load_all,
    missing_commands,
    packages,
    part_names,
    plugin_names,
    plugins,
)

DRAFTER = """
from blockdraft.drafters import DrafterSpec

DRAFTER = DrafterSpec(lambda folder, target: None, by_name=True)
"""
Install = Callable[[str, str, Path], None]


def test_files_of_another_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    (tmp_path / "base.py").write_text("")
    names = plugin_names(quantized.__name__)
    assert "awq" in names and "base" not in names
    monkeypatch.setattr(quantized, "__path__", [*quantized.__path__, str(tmp_path)])
    assert plugin_names(quantized.__name__) == sorted([*names, "mine"])
    assert plugins(quantized.__name__)["mine"].VALUE == 3


def test_every_drafter_of_the_core_is_listed() -> None:
    root = Path(drafters.__path__[0])
    modules = {path.stem for path in root.glob("*.py") if "\nDRAFTER = " in path.read_text()}
    assert set(KINDS) == modules | {path.parent.name for path in root.glob("*/drafter.py")}
    assert {"dflash", "eagle3", "mtp"} <= set(part_names("layout")) and "none" not in part_names("layout")


def test_a_plugin_is_found_and_a_broken_one_is_named_once(
    tmp_path: Path, installed_plugin: Install, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one_of_mine.py").write_text(DRAFTER)
    (tmp_path / "broken_of_mine.py").write_text("raise RuntimeError('no such luck')\n")
    points = "[blockdraft.drafters]\nmine = one_of_mine\nbroken = broken_of_mine\nabsent = not_there\n"
    installed_plugin("my-drafters", points, tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            report = drafter_modules()
    assert report["mine"].DRAFTER.by_name and not {"broken", "absent"} & set(report)
    assert [("my-drafters" in line, "no such luck" in line) for line in caplog.messages] == [
        (True, False),
        (True, True),
    ]
    del sys.modules["one_of_mine"]


def test_a_plugin_does_not_replace_a_drafter_of_the_core(tmp_path: Path, installed_plugin: Install) -> None:
    (tmp_path / "another_lookup.py").write_text(DRAFTER)
    installed_plugin("another", "[blockdraft.drafters]\nlookup = another_lookup\n", tmp_path)
    assert drafter_modules()["lookup"].__name__ == "blockdraft.drafters.lookup"


def test_the_first_of_two_packages_has_a_name(
    tmp_path: Path, installed_plugin: Install, caplog: pytest.LogCaptureFixture
) -> None:
    for package in ("b-package", "a-package"):
        installed_plugin(package, f"[blockdraft.pages]\nsame = {package[0]}_pages:page\n", tmp_path)
        (tmp_path / f"{package[0]}_pages.py").write_text(f"page = {package!r}\n")
    assert load_all("blockdraft.pages")["same"] == "a-package"
    assert "b-package" in caplog.text and "Uninstall" in caplog.text
    del sys.modules["a_pages"]


def test_what_this_projects_packages_bring_is_what_they_register() -> None:
    for package, groups in PACKAGES.items():
        for group, names in groups.items():
            registered = {n for n, entry in entry_points(group).items() if entry.dist and entry.dist.name == package}
            in_files = {name for name in names if group == DRAFTERS and (name != name.lower() or "_num_" in name)}
            assert set(names) - in_files == registered


def test_installed_packages(tmp_path: Path, installed_plugin: Install) -> None:
    installed_plugin("strangers-drafter", "[blockdraft.drafters]\nstrange = absent\n", tmp_path)
    assert {"blockdraft-tools", "blockdraft-compat", "strangers-drafter"} <= {*packages()}
    assert len(packages()) == len({*packages()}) and missing_commands() == {}


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch,
    installed_plugin: Install,
    blockdraft: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    assert install_hint(COMMANDS, "train", tmp_path / "absent") == "pip install blockdraft-train"
    assert install_hint(COMMANDS, "no such command") is None
    folder = Path(__file__).parents[1] / "packages"
    train = f"pip install -e {folder / 'bench'} -e {folder / 'tools'} -e {folder / 'train'}"
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(typer.main, "get_command", typer.main.get_command.__wrapped__)  # which tests of commands cache
    forget()
    assert missing_commands()["blockdraft-bench"] == ("bench", "bench server", "calibrate")
    shown = " ".join(re.sub(r"[│\s]+", " ", blockdraft("--help")[1]).split())
    assert (
        "More commands come with the packages blockdraft-tools (inspect, quantize, export), blockdraft-bench" in shown
    )
    code, _, err = blockdraft("train", "dflash")
    assert code == 2 and err == f"error: The command train is not installed; {train} brings it.\n"
    with pytest.raises(UsageError, match="backend is 'jax', which is not installed; pip install .*jax brings it"):
        load_target("bundled", backend="jax")
    code, _, err = blockdraft("serve", "--port", 0, "--drafter", "none", "--record", tmp_path / "record")
    assert code == 2 and f"--record needs another package; run {train}." in err
    code, _, err = blockdraft("generate", "--drafter", "block_diffusion", "Hello")
    assert code == 2 and f"{folder / 'diffusion'} brings it" in err
