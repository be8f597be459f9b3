"""The accelerator and the process it runs in."""

import subprocess
import sys

import pytest

# In a process of its own: holes that other tests left in the heap would be counted.
FAULTS = """
import resource
import torch
from blockdraft.training.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)  # 64 MiB, above glibc's largest threshold for blocks of their own
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()
print(kept, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switch")
def test_freed_memory_is_reused() -> None:
    answer = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=120)
    kept, faults = answer.stdout.split()
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    # 16,384 pages each of the five times where nothing is kept, unless pages are huge.
    assert int(faults) < 16_384
