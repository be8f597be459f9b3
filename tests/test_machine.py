import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from blockdraft import machine
from blockdraft.machine import free_bytes, processor_flags, processor_name, send

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path: Path, free_memory: Callable[[int], None], constants: Callable[..., None]) -> Path:
    """Where control groups are; the machine itself has 1000 bytes free, and this process is in no group."""
    free_memory(1000)
    constants(machine, CGROUPS=tmp_path / "cgroup", OWN_CGROUP=tmp_path / "own")
    return tmp_path / "cgroup"


def own(groups: Path, *lines: str) -> None:
    (groups.parent / "own").write_text("".join(f"{line}\n" for line in lines))


def group2(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 3\ninactive_file {cached}\n")


def group1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


def test_without_groups_the_machine_decides(groups: Path) -> None:
    assert free_bytes(CPU) == 1000
    own(groups, "0::/user/app")  # a group that says nothing
    assert free_bytes(CPU) == 1000


def test_the_tightest_of_a_group_and_those_above_it_decides(groups: Path) -> None:
    own(groups, "0::/user/app")
    group2(groups / "user" / "app", "max", 900)
    assert free_bytes(CPU) == 1000
    group2(groups / "user" / "app", "900", 300, cached=50)  # files that are given up are as good as free
    assert free_bytes(CPU) == 650
    group2(groups / "user", "500", 400)
    assert free_bytes(CPU) == 100
    group2(groups, "5000", 100)  # as a container sees its own group
    assert free_bytes(CPU) == 100
    group2(groups, "450", 400)
    assert free_bytes(CPU) == 50
    group2(groups.parent, "1", 1)  # above them is no group
    assert free_bytes(CPU) == 50
    group2(groups, "300", 400)  # a limit that was lowered
    assert free_bytes(CPU) == 0


def test_groups_of_the_first_kind_have_a_hierarchy_of_memory(groups: Path) -> None:
    own(groups, "4:cpu,cpuacct:/elsewhere", "3:blkio,memory:/user/app", "1:name=systemd:/user")
    group1(groups / "memory" / "elsewhere", 10, 5)
    assert free_bytes(CPU) == 1000
    group1(groups / "memory" / "user" / "app", 2**63 - 4096, 300)  # no limit
    assert free_bytes(CPU) == 1000
    group1(groups / "memory" / "user", 700, 200, cached=20)
    assert free_bytes(CPU) == 520
    group2(groups, "5", 5)  # belongs to the other kind, in which this process is not
    assert free_bytes(CPU) == 520


def test_both_kinds_side_by_side(groups: Path) -> None:
    own(groups, "2:memory:/a", "0::/b")
    group1(groups / "memory" / "a", 600, 100)
    group2(groups / "b", "400", 100)
    assert free_bytes(CPU) == 300


def test_tensor_on_the_device_is_not_copied() -> None:
    values = torch.arange(3)
    assert send(values, CPU) is values


def test_flags_are_those_that_all_cores_have(tmp_path: Path, constants: Callable[..., None]) -> None:
    info = tmp_path / "cpuinfo"
    constants(machine, CPUINFO=info)
    assert processor_flags() == frozenset()
    info.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 avx512f\nvmx flags\t: vnmi\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
    )
    assert processor_flags() == {"fpu", "avx2"}
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd08\n")
    assert processor_flags() == {"fp", "asimd"}
    info.write_text("model name\t: A Processor\nprocessor\t: 1\nmodel name\t: Another\n")
    assert processor_name() == "A Processor"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_a_peak_is_what_was_taken_at_most_since() -> None:
    before = torch.ones(256 << 20, dtype=torch.uint8)
    del before  # no peak of what comes
    peak = machine.PeakMemory()
    least = peak.bytes()
    taken = torch.ones(384 << 20, dtype=torch.uint8)
    del taken
    most = peak.bytes()
    assert least is not None and most is not None
    # Wide bounds: the system may take pages of mapped files from this process at any time.
    assert least < 128 << 20 and 256 << 20 <= most < 512 << 20


def test_a_peak_that_cannot_be_measured_is_not_known(tmp_path: Path, constants: Callable[..., None]) -> None:
    constants(machine, PROCESS=tmp_path / "absent")
    assert machine.PeakMemory().bytes() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_child_ends_with_its_parent() -> None:
    """Even with one that is killed."""
    code = (
        "import subprocess, sys; from blockdraft.machine import die_with_parent; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], preexec_fn=die_with_parent); "
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_uncollected_is_undone_by_an_error() -> None:
    with pytest.raises(ValueError, match="x"), machine.uncollected():
        assert not gc.isenabled()
        raise ValueError("x")
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()
