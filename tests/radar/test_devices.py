"""The table of devices: every row follows the schema and is plausible, and names find their devices."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from blockdraft.errors import UsageError
from blockdraft.radar.devices import FILE, Device, devices, find, read_devices

ROW = {
    "name": "A",
    "maker": "B",
    "class": "cpu",
    "year": 2020,
    "bandwidth_gbs": 10.0,
    "fp32": 1.0,
    "source": "https://example.org",
}

# Least and most of: memory (GB), bandwidth (GB/s), bf16 (teraflops), operations a byte (bf16 over bandwidth).
PLAUSIBLE = {
    "nvidia-datacentre": ((16, 300), (300, 8000), (60, 2500), (100, 500)),
    "nvidia-consumer": ((6, 128), (150, 1800), (15, 500), (45, 400)),
    "amd-datacentre": ((64, 288), (1600, 8000), (180, 2600), (100, 320)),
    "amd-consumer": ((8, 128), (250, 1000), (25, 200), (60, 330)),
    "apple": ((16, 512), (68, 820), (2.5, 80), (25, 125)),
    "tpu": ((16, 200), (800, 7400), (190, 2400), (160, 570)),
    "cpu": ((0, 0), (17, 620), (0.1, 600), (5, 900)),
}


def toml(*rows: dict[str, Any]) -> str:
    """A table of some rows; what is None is left out."""
    lines = [[f"{key} = {value!r}" for key, value in row.items() if value is not None] for row in rows]
    return "\n".join("[[device]]\n" + "\n".join(line) for line in lines)


def test_the_table_is_wide() -> None:
    assert devices() == read_devices(FILE.read_text(encoding="utf-8"))
    assert len(devices()) >= 140 and {device.kind for device in devices()} == set(PLAUSIBLE)
    named = "RTX 2060, RTX 3090, RTX 4090 Laptop, RTX 5090, H100 SXM, H200 SXM, B200 SXM, MI300X, TPU v5p, M1, M5"
    assert all(find(name).name == name for name in named.split(", "))


def test_rows_are_plausible() -> None:
    for device in devices():
        plausible(device)


def plausible(device: Device) -> None:
    assert all(find(name) == device for name in device.names)
    memory, bandwidth, bf16, ridge = PLAUSIBLE[device.kind]
    assert memory[0] <= (device.memory_gb or 0) <= memory[1]
    assert bandwidth[0] <= device.bandwidth_gbs <= bandwidth[1]
    assert 2015 < device.year < 2027
    if device.bf16:
        assert bf16[0] <= device.bf16 <= bf16[1]
        assert ridge[0] <= 1000 * device.bf16 / device.bandwidth_gbs <= ridge[1]
        assert device.bf16 >= (device.fp32 or 0)
    # Every halving of the bits doubles the rate at most; GeForce halves the rates of sums in 32 bits, not of int8.
    if device.bf16 and device.fp8:
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=0.03)
    if device.fp8 and device.fp4:
        assert 1.9 <= device.fp4 / device.fp8 <= 4.1
    if device.bf16 and device.int8:
        assert 0.9 <= device.int8 / device.bf16 <= 4.1


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Apple M4 Max", "M4 Max 40-core"),
        ("Intel(R) Core(TM) i9-13900K", "Core i9-13900K"),
    ],
)
def test_drivers_names_find_their_devices(said: str, name: str) -> None:
    assert find(said).name == name


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("RTX 4091", "RTX 4090"),
        ("4080", "RTX 4080"),
        ("M4 Max 41-core", "M4 Max 40-core"),
        ("abacus", "devices.toml lists those"),
    ],
)
def test_an_unknown_device_is_answered_with_near_names(name: str, offered: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s){re.escape(repr(name))}.*{re.escape(offered)}"):
        find(name)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{**ROW, "class": "abacus"}], "class"),
        ([{**ROW, "bandwidth_gbs": 0.0}], "greater than 0"),
        ([{**ROW, "source": "a friend"}], "source"),
        ([{**ROW, "fp32": None}], "no arithmetic"),
        ([{**ROW, "class": "apple"}], "no memory"),
        ([{**ROW, "bf17": 1.0}], "bf17"),
        ([ROW, {**ROW, "name": "NVIDIA a"}], "several devices are named a"),
    ],
)
def test_a_table_with_faults_is_refused(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read_devices(toml(*rows))
