"""This machine: what drivers tell, and what is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockdraft.kernels.cpu.build import begun
from blockdraft.machine import multiplies_bfloat16
from blockdraft.radar import machine


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of commands in the place of the machine's."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setattr(
        machine.shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None
    )
    return tmp_path


def put(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


def test_gpus_by_their_tools(tools: Path) -> None:
    assert machine.gpus() == []
    put(tools, "nvidia-smi", "echo NVIDIA GeForce RTX 4090; echo NVIDIA GeForce RTX 4090")
    put(
        tools, "rocm-smi", "echo 'GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X'; echo 'GPU[0] : Card SKU: M3000100'"
    )
    assert machine.gpus() == ["NVIDIA GeForce RTX 4090"] * 2 + ["AMD Instinct MI300X"]


def test_tool_that_fails_tells_no_gpu(tools: Path) -> None:
    put(tools, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert machine.gpus() == []


@pytest.mark.slow
def test_several_gpus_of_a_kind_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA GeForce RTX 4090"] * 2 + ["Voodoo 2"])
    monkeypatch.setattr(machine, "_fastest", lambda call: 1e-3)
    told: list[str] = []
    first, processors = machine.here(told.append)
    assert (first.name, first.count, first.measured) == ("2x RTX 4090", 2, False)
    assert processors.kind == "cpu"
    assert "Voodoo 2" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_processors_are_measured(monkeypatch: pytest.MonkeyPatch, compiler: bool) -> None:
    if not compiler:
        monkeypatch.setenv("CC", "no-such-compiler")
    begun.cache_clear()
    found, cut = machine.measured(), machine.measured(ram_gb=32)
    begun.cache_clear()
    assert found.measured and found.note is not None and "4 bits" in found.note
    assert 0.2 < found.bandwidth_gbs < 5000
    assert found.fp32 and found.int8 and min(found.fp32, found.int8) > 0.0005
    assert (found.bf16 is not None) == multiplies_bfloat16()
    assert cut.memory_gb == 32
