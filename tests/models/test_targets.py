"""Names of the catalogue as targets, and the drafters that go with them. A tiny model stands in for a real one."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli.target import DrafterSettings
from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.models import (
    bundled_drafter,
    default_target,
    known,
    model_of,
    models_folder,
    named_for_others,
    places,
)
from blockdraft.targets import BUNDLED, describe_target, load_target, load_target_text
from blockdraft_bench.methods import parse_methods
from blockdraft_bench.speed import load_methods
from blockdraft_tools.checkpoint import open_checkpoint
from blockdraft_tools.export import format_for
from blockdraft_tools.inspect import inspect


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path, own_cache: Path) -> Path:
    """SmolLM2 as pulled from the hub; it is a tiny Qwen3."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_target_dir, models_folder() / "smollm2"))


@pytest.fixture
def its_drafter(tmp_path: Path, constants: Callable[..., None], tiny_drafter_dir: Path) -> Path:
    """A bundled drafter of SmolLM2."""
    constants(places, PAIRS=tmp_path / "pair")
    return Path(shutil.copytree(tiny_drafter_dir, tmp_path / "pair/smollm2/drafter"))


@pytest.fixture
def unbundled(tmp_path: Path, constants: Callable[..., None]) -> None:
    """No model of the catalogue has a bundled drafter."""
    constants(places, PAIRS=tmp_path / "pair")


def test_a_name_is_a_target_wherever_a_folder_is(pulled: Path) -> None:
    assert load_target("smollm2-135m").path == pulled
    assert load_target_text("smollm2").path == pulled
    assert describe_target("SmolLM2").path == str(pulled)
    with open_checkpoint("smollm2") as checkpoint:
        assert checkpoint.wanted.hidden_size == 32
    assert inspect("smollm2").what == "target"
    assert model_of(pulled) == known("smollm2") and model_of(BUNDLED) is None and model_of(None) is None


@pytest.mark.parametrize("load", [load_target, load_target_text, describe_target, inspect])
def test_what_is_not_here_is_not_fetched(load: Callable[[str], Any], own_cache: Path) -> None:
    with pytest.raises(
        UsageError, match="Qwen3-4B is not on this machine yet; `blockdraft pull qwen3-4b` downloads it"
    ):
        load("qwen3-4b")


def test_its_drafter_is_the_bundled_one(pulled: Path, its_drafter: Path) -> None:
    target = load_target("smollm2")
    assert bundled_drafter(known("smollm2")) == its_drafter
    assert load_drafter(target=target).path == its_drafter == load_drafter("bundled", target=target).path
    tiny = load_target("bundled")
    assert load_drafter(target=tiny).path != its_drafter


def test_it_drafts_with_lookup_where_the_catalogue_says_so(
    its_drafter: Path, tiny_target_dir: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of Qwen2.5-Coder-1.5B does, and the name "bundled" is the drafter alone; here the 0.5B has none."""
    for size in ("0.5b", "1.5b"):
        shutil.copytree(tiny_target_dir, models_folder() / f"qwen2.5-coder-{size}")
    own = Path(shutil.copytree(its_drafter, its_drafter.parents[1] / "qwen2.5-coder-1.5b/drafter"))
    target = load_target("qwen2.5-coder-1.5b")
    assert [part.path for part in load_drafter(target=target).parts] == [None, own]
    assert load_drafter(target=target).kind == "lookup+dflash"
    assert load_drafter("bundled", target=target).kind == "dflash"
    [_, chain, both] = load_methods(parse_methods("none,chain,lookup+chain", None, 4, 16), target, 1).values()
    assert (chain.drafter.kind, both.drafter.kind) == ("dflash", "lookup+dflash")
    capsys.readouterr()
    DrafterSettings().load(target)
    assert capsys.readouterr().err == (
        "Drafting with lookup and the drafter bundled for qwen2.5-coder-1.5b; --drafter none decodes without it.\n"
    )
    assert load_drafter(target=load_target("qwen2.5-coder-0.5b")).kind == "lookup"


def test_a_bundled_drafter_may_be_a_gguf_file(its_drafter: Path) -> None:
    (its_drafter / "drafter.gguf").touch()
    assert bundled_drafter(known("smollm2")) == its_drafter / "drafter.gguf"


@pytest.mark.usefixtures("unbundled")
def test_without_one_the_text_is_looked_up(pulled: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = load_target("smollm2")
    with caplog.at_level(logging.WARNING):
        assert type(load_drafter(target=target)).__name__ == "LookupDrafter"
    with pytest.raises(UsageError, match="No drafter is bundled for SmolLM2-135M-Instruct; leave the drafter out"):
        load_drafter("bundled", target=target)


def test_its_file_is_known_at_another_place(tmp_path: Path) -> None:
    """By name and size, so that it is drafted for as under its name."""
    file = known("smollm2").file
    assert file is not None
    place = tmp_path / file.name.upper()
    with place.open("wb") as out:
        out.truncate(file.bytes)
    assert model_of(place) == known("smollm2")
    os.truncate(place, file.bytes - 1)
    assert model_of(place) is None


@pytest.mark.parametrize("name, hidden_size", [("qwen2.5-coder-0.5b", 896), ("qwen2.5-coder-1.5b", 1536)])
def test_a_drafter_of_another_size_is_refused(name: str, hidden_size: int) -> None:
    message = f"hidden_size must be the target's, 224, got {hidden_size}; use a drafter made for it"
    with pytest.raises(UsageError, match=message):
        load_drafter(bundled_drafter(known(name)), target=load_target("bundled"))


def test_the_default_pair(pulled: Path, its_drafter: Path, tiny_drafter_dir: Path) -> None:
    """SmolLM2's own file once it is pulled, with its drafter; the tiny pair without either."""
    file = known("smollm2").file
    assert file is not None
    assert default_target() == BUNDLED  # the folder of the hub has other weights than its drafter was made for
    place = models_folder() / file.name
    place.touch()
    assert default_target() == place
    shutil.rmtree(its_drafter)
    assert default_target() == BUNDLED


def test_drafters_for_other_engines_name_the_model_on_the_hub(pulled: Path) -> None:
    """Its place in our cache folder would be none elsewhere."""
    target = load_target("smollm2")
    assert format_for("speculators", target, "smollm2").target.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert format_for("speculators", load_target("bundled"), None).target.name == str(BUNDLED)
    assert named_for_others("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert named_for_others("some/model") == "some/model"
