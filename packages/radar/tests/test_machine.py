"""This machine: GPUs as reported by drivers, and measured processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockdraft.kernels.cpu.build import begun
from blockdraft.machine import multiplies_bfloat16
from blockdraft_radar import machine
from blockdraft_radar.devices import find, machine_of


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of commands that hides the machine's own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


def test_gpus_from_drivers(tools: Path) -> None:
    assert machine.gpus() == []
    put(tools, "nvidia-smi", "echo NVIDIA GeForce RTX 4090; echo NVIDIA GeForce RTX 4090")
    put(
        tools, "rocm-smi", "echo 'GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X'; echo 'GPU[0] : Card SKU: M3000100'"
    )
    assert machine.gpus() == ["NVIDIA GeForce RTX 4090"] * 2 + ["AMD Instinct MI300X"]


def test_failing_driver_reports_no_gpu(tools: Path) -> None:
    put(tools, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert machine.gpus() == []


def test_equal_gpus_are_one_machine(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not in the table is reported and skipped."""
    put(tools, "nvidia-smi", "echo NVIDIA GeForce RTX 4090; echo NVIDIA GeForce RTX 4090; echo Voodoo 2")
    processors = machine_of(find("Ryzen 9 9950X"))
    monkeypatch.setattr(machine, "measured", lambda ram_gb: processors)
    reports: list[str] = []
    gpus, cpu = machine.here(reports.append)
    assert (gpus.name, gpus.count, gpus.measured) == ("2x RTX 4090", 2, False) and cpu is processors
    [report] = reports
    assert "Voodoo 2" in report


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_processors_are_measured(monkeypatch: pytest.MonkeyPatch, compiler: bool) -> None:
    if not compiler:
        monkeypatch.setenv("CC", "no-such-compiler")
    begun.cache_clear()
    measured = machine.measured(ram_gb=32)
    begun.cache_clear()
    assert measured.measured and measured.note is not None and "4 bits" in measured.note
    assert 0.2 < measured.bandwidth_gbs < 5000 and measured.memory_gb == 32
    assert measured.fp32 and measured.int8 and min(measured.fp32, measured.int8) > 0.0005
    assert (measured.bf16 is not None) == multiplies_bfloat16()
