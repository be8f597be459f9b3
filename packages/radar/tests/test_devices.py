"""The table of devices: schema, plausible values, and lookup by name."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from blockdraft.errors import UsageError
from blockdraft_radar.devices import FILE, Device, devices, find, read_devices

ROW = {
    "name": "A",
    "maker": "B",
    "class": "cpu",
    "year": 2020,
    "bandwidth_gbs": 10.0,
    "fp32": 1.0,
    "source": "https://example.org",
}

# Ranges of memory (GB), bandwidth (GB/s), bf16 (teraflops), and operations per byte (bf16 over bandwidth).
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
    """Return a table in TOML, without values that are None."""
    lines = [[f"{key} = {value!r}" for key, value in row.items() if value is not None] for row in rows]
    return "\n".join("[[device]]\n" + "\n".join(line) for line in lines)


def test_table_covers_all_classes() -> None:
    assert devices() == read_devices(FILE.read_text(encoding="utf-8"))
    assert len(devices()) >= 140 and {device.kind for device in devices()} == set(PLAUSIBLE)
    names = "RTX 2060, RTX 3090, RTX 4090 Laptop, RTX 5090, H100 SXM, H200 SXM, B200 SXM, MI300X, TPU v5p, M1, M5"
    assert all(find(name).name == name for name in names.split(", "))


@pytest.mark.parametrize("kind", PLAUSIBLE)
def test_values_are_plausible(kind: str) -> None:
    for device in devices():
        if device.kind == kind:
            check_values(device)


def check_values(device: Device) -> None:
    assert all(find(name) == device for name in device.names)
    memory, bandwidth, bf16, ridge = PLAUSIBLE[device.kind]
    assert memory[0] <= (device.memory_gb or 0) <= memory[1]
    assert bandwidth[0] <= device.bandwidth_gbs <= bandwidth[1]
    assert 2015 < device.year < 2027
    if device.bf16:
        assert bf16[0] <= device.bf16 <= bf16[1]
        assert ridge[0] <= 1000 * device.bf16 / device.bandwidth_gbs <= ridge[1]
        assert device.bf16 >= (device.fp32 or 0)
    # Halving the bits at most doubles the rate; GeForce halves the rate of float32 accumulation, but not of int8.
    if device.bf16 and device.fp8:
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=0.03)
    if device.fp8 and device.fp4:
        assert 1.9 <= device.fp4 / device.fp8 <= 4.1
    if device.bf16 and device.int8:
        assert 0.9 <= device.int8 / device.bf16 <= 4.1


@pytest.mark.parametrize(
    ("query", "name"),
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
def test_find_by_driver_name(query: str, name: str) -> None:
    assert find(query).name == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RTX 4091", "RTX 4090"),
        ("4080", "RTX 4080"),
        ("M4 Max 41-core", "M4 Max 40-core"),
        ("abacus", "devices.toml lists the known devices"),
    ],
)
def test_unknown_device_suggests_similar_names(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s){re.escape(repr(name))}.*{re.escape(hint)}"):
        find(name)


@pytest.mark.parametrize(
    ("rows", "message"),
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
def test_invalid_table(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_devices(toml(*rows))
